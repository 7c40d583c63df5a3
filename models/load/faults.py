"""Errors of a model that is tried out: whose they are, and what they are in words."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from ..errors import ModelError, ModelLoadError

log = structlog.get_logger()

_PACKAGE = __name__.partition(".")[0]


def explain(error: Exception) -> str:
    """Name the reason why a trial of several sequences failed.

    A model may use a layer's state in a way that a batch has no answer to: that raises in the
    model's code. An error in umbel's own code is a fault of umbel's, and is logged: otherwise it
    would pass for a model that cannot run in batches, and only be slow.

    Args:
        error: that was raised.
    """
    module = _module_of(error)
    if isinstance(error, ValueError) or module.partition(".")[0] != _PACKAGE:
        return f"the model does with a layer's state what a batch cannot: {error}"
    reason = f"a fault of {_PACKAGE}'s own, in {module}: {type(error).__name__}: {error}"
    log.error("a trial of several sequences failed", reason=reason)
    return reason


@contextmanager
def failures_in_words(name: str, *passed: type[Exception]) -> Iterator[None]:
    """Turn errors that a model raises while it is tried out into a `ModelLoadError`.

    Args:
        name: of the model.
        passed: errors that have another cause, and pass as they are.

    Raises:
        ModelLoadError: the model failed.
    """
    in_words: tuple[type[Exception], ...] = (ModelError, *passed)
    try:
        yield
    except in_words:
        raise
    except Exception as error:
        log.debug("a model failed while it was tried out", model=name, exc_info=error)
        raise ModelLoadError(
            f"{name} fails when it is tried out, with {type(error).__name__} in "
            f"{_module_of(error)}: {error}"
        ) from error


def _module_of(error: Exception) -> str:
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return str(last.f_globals.get("__name__", ""))
