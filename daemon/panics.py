"""Panics of libraries in Rust: they pass every `except Exception`, and are errors all the same."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class PanicError(RuntimeError):
    """A library has panicked; the message is its own."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic inside the block into an `Exception`; what ends a task or a process passes.

    Raises:
        PanicError: the block panicked.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise PanicError(f"{type(error).__name__}: {error}") from error
