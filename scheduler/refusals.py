"""What the engine tells a request that it cannot serve."""

from .bounds import RETRY_AFTER
from .errors import DeadlineExceededError, UnavailableError
from .sequence import Sequence, SequenceStatus


def no_room(needed: int, usable: int, pinned: int) -> UnavailableError:
    """Make the error of a request for which there is no memory at present.

    Args:
        needed: bytes that it takes to start.
        usable: bytes that may be held.
        pinned: those of them that pins of its tenant hold; of others' it hears nothing.
    """
    return UnavailableError(
        f"memory is short: the request needs {needed} bytes of {usable} that may be used at present"
        + (f", of which your pins hold {pinned}: unpin something, or" if pinned else ";")
        + " try again later",
        retry_after=RETRY_AFTER,
    )


def late(sequence: Sequence) -> DeadlineExceededError:
    """Make the error of a request whose deadline has passed."""
    state = "waited" if sequence.status is SequenceStatus.WAITING else "ran"
    return DeadlineExceededError(f"the request still {state} when its time was over")
