"""Imports mlx-lm without its limit on open files.

`mlx_lm.utils` lowers RLIMIT_NOFILE to 2,048, and the hard limit to 4,096, which only root could
raise again. So the call does nothing during the import.
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
