"""Imports mlx-lm without its bound on open files.

`mlx_lm.utils` sets RLIMIT_NOFILE to 2,048 when it is imported, and the hard limit to 4,096.
Only root could raise that again, so the call does nothing while the module is imported.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _limits_kept() -> Iterator[None]:
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = setrlimit


with _limits_kept():
    import mlx_lm.utils  # noqa: F401
