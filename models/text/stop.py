"""Finds stop sequences in text that arrives in pieces."""

from collections.abc import Sequence


class StopScanner:
    """Passes text on until a stop sequence appears, and holds back what might become one.

    The stop sequence that is complete first wins, and of two that are complete at the same
    character the longer one: what is found does not depend on how the text was cut. The
    stop sequence itself is not passed on.

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece; return what is certain not to belong to a stop sequence."""
        if self.matched is not None or not text:
            return ""
        buffer = self._held + text
        found = [(at + len(s), at, s) for s in self._stops if (at := buffer.find(s)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return buffer[:at]
        keep = max((_overlap(buffer, s) for s in self._stops), default=0)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """End of text: return what was held back after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
