"""Finds the first of several texts in text that arrives in pieces."""

import re
from collections.abc import Mapping, Sequence


class Edges:
    """Markers, and the states of an answer to which they lead.

    The marker that is complete first wins, and of two that are complete at the same character
    the longer one: what is found does not depend on how the text was cut.
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        self.targets = dict(targets)
        self.longest = max(map(len, targets), default=0)
        ordered = sorted(targets, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._openings = frozenset(m[:n] for m in targets for n in range(1, len(m)))

    def search(self, text: str, start: int, end: int) -> tuple[int, str] | None:
        """Find the first marker in `text[start:end]`: where it begins, and which it is."""
        if self._pattern is None or (match := self._pattern.search(text, start, end)) is None:
            return None
        begin, marker = match.start(), match.group()
        for other in self.targets:  # one inside it, complete before it
            at = text.find(other, begin, begin + len(marker) - 1)
            if at >= 0 and at + len(other) < begin + len(marker):
                begin, marker = at, other
        return begin, marker

    def held(self, text: str, start: int) -> int:
        """Count the characters at the end of `text[start:]` that may begin a marker."""
        most = min(self.longest - 1, len(text) - start)
        return next((n for n in range(most, 0, -1) if text[-n:] in self._openings), 0)


class StopScanner:
    """Passes text on until a stop sequence appears, and holds back what might become one.

    Args:
        stops: none of them empty.

    Attributes:
        matched: the stop sequence that was found; it is not passed on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._edges = Edges(dict.fromkeys(stops, ""))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece; return what is certain not to belong to a stop sequence."""
        if self.matched is not None or not text:
            return ""
        text = self._held + text
        if (found := self._edges.search(text, 0, len(text))) is not None:
            end, self.matched = found
        else:
            end = len(text) - self._edges.held(text, 0)
        self._held = "" if self.matched else text[end:]
        return text[:end]

    def flush(self) -> str:
        """End of text: return what was held back after all."""
        held, self._held = self._held, ""
        return held
