"""Parts of an answer in their order, in any model's form; plain text and stop sequences."""

from collections.abc import Sequence
from typing import NamedTuple

from .formats import Edges


class TextDelta(NamedTuple):
    """More of the answer's content.

    Attributes:
        text: never empty.
        start: index of its first character in all that the model wrote, markup included.
    """

    text: str
    start: int


class ReasoningDelta(NamedTuple):
    """More of the model's thoughts. Never empty."""

    text: str


class ToolCallStart(NamedTuple):
    """A call begins; calls count from 0. Some forms have ids."""

    call: int
    name: str
    id: str | None = None


class ToolCallDelta(NamedTuple):
    """More of a call's arguments, a fragment of JSON text. Never empty."""

    call: int
    arguments: str


class ToolCallEnd(NamedTuple):
    """A call's arguments are complete."""

    call: int


OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class PlainParser:
    """Passes all text on as content, for text completions."""

    in_reasoning = False
    done = False

    def __init__(self) -> None:
        self._passed = 0

    def push(self, text: str) -> list[OutputEvent]:
        """Return the text as an event."""
        if not text:
            return []
        start, self._passed = self._passed, self._passed + len(text)
        return [TextDelta(text, start)]

    def flush(self) -> list[OutputEvent]:
        """Return nothing: no text is held back."""
        return []


class StopScanner:
    """Passes text on up to a stop sequence, and holds text back that may begin one.

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
        """Take more text; return the part that belongs to no stop sequence."""
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
        """End the text: return the text that was held back."""
        held, self._held = self._held, ""
        return held
