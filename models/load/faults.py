"""Whose fault it is that a model cannot run in batches."""

import traceback

import structlog

log = structlog.get_logger()

_PACKAGE = __name__.partition(".")[0]


def explain(error: Exception) -> str:
    """Say why a trial of several sequences failed.

    Models do with the state of a layer what they like, and what they ask for may not be there:
    that is raised in their code. An attribute or argument that our own code does not find is our
    own mistake, and the log says so: it would pass for a model that cannot run in batches, and
    nobody would miss the speed.

    Args:
        error: that was raised.
    """
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    module = last.f_globals.get("__name__", "")
    if isinstance(error, ValueError) or module.partition(".")[0] != _PACKAGE:
        return f"the model does with a layer's state what a batch cannot: {error}"
    reason = f"a fault of {_PACKAGE}'s own, in {module}: {type(error).__name__}: {error}"
    log.error("a trial of several sequences failed", reason=reason)
    return reason
