"""Costs of work that do not depend on the machine's other load."""

import sys
from collections.abc import Callable
from types import FrameType

Trace = Callable[[FrameType, str, object], "Trace"]


def lines_run(work: Callable[[], object]) -> int:
    """Count the lines of Python that something runs."""
    lines = 0

    def count(frame: FrameType, event: str, arg: object) -> Trace:
        nonlocal lines
        del frame, arg
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines
