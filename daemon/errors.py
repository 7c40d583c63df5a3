"""Errors that end a command in a sentence, and panics of libraries in Rust."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class StartError(Exception):
    """The daemon cannot start. The message, as of all errors here, is for the user."""


class ConfigError(StartError):
    """A setting is unknown, or has a faulty value."""


class FlagError(ConfigError):
    """The command line has a fault."""


class SocketError(StartError):
    """The socket is not available."""


class ClientError(Exception):
    """The daemon cannot be reached, or refused."""


class ServiceError(Exception):
    """umbel is no service of this machine, or cannot become one."""


class PanicError(RuntimeError):
    """A library in Rust has panicked; the message is its own."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Turn a panic in the block into an `Exception`, which it is not by itself.

    Raises:
        PanicError: the block panicked.
    """
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise PanicError(f"{type(error).__name__}: {error}") from error
