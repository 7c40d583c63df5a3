"""How far a download is, and who looks at it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

STALLED_AFTER = 60.0
"""Seconds without a byte, after which a download is given up."""


class Progress(NamedTuple):
    """How far a download is.

    Attributes:
        done: bytes that are here, those of earlier attempts included.
        total: bytes of all files.
    """

    done: int
    total: int


@dataclass
class Watch:
    """An observer of a download, from any thread.

    Attributes:
        report: told how far it is, a few times a second while bytes arrive.
        stop: once set, it ends with an error soon; what has arrived is kept.
        stalled_after: seconds without a byte, after which it is given up.
    """

    report: Callable[[Progress], object] = lambda _: None
    stop: threading.Event = field(default_factory=threading.Event)
    stalled_after: float = STALLED_AFTER
