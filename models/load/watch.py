"""Progress of a download, and its observer."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

STALLED_AFTER = 60.0
"""Seconds without a byte, after which a download is given up."""


class Progress(NamedTuple):
    """Bytes of a download that are here, from earlier attempts too, and of all files."""

    done: int
    total: int


@dataclass
class Watch:
    """An observer of a download, from any thread.

    Attributes:
        report: called a few times a second while bytes arrive.
        stop: once set, the download soon ends with an error; received bytes are kept.
        stalled_after: seconds without a byte after which it fails.
    """

    report: Callable[[Progress], object] = lambda _: None
    stop: threading.Event = field(default_factory=threading.Event)
    stalled_after: float = STALLED_AFTER
