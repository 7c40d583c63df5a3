"""An answer's parts in the order in which they come, whatever the model's way of writing them."""

from typing import NamedTuple


class TextDelta(NamedTuple):
    """More of the answer's content.

    Attributes:
        text: never empty.
        start: the character of all that the model wrote, markup included, at which it begins.
    """

    text: str
    start: int


class ReasoningDelta(NamedTuple):
    """More of what the model thinks before it answers. Never empty."""

    text: str


class ToolCallStart(NamedTuple):
    """A call begins: the answer's first has the number 0. Some forms of calls have ids."""

    call: int
    name: str
    id: str | None = None


class ToolCallDelta(NamedTuple):
    """More of a call's arguments: a fragment of a JSON text. Never empty."""

    call: int
    arguments: str


class ToolCallEnd(NamedTuple):
    """A call's arguments are complete."""

    call: int


OutputEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class PlainParser:
    """Passes all text on as content; what text completions are read with."""

    in_reasoning = False
    done = False

    def __init__(self) -> None:
        self._passed = 0

    def push(self, text: str) -> list[OutputEvent]:
        """Take more text; return it."""
        if not text:
            return []
        start, self._passed = self._passed, self._passed + len(text)
        return [TextDelta(text, start)]

    def flush(self) -> list[OutputEvent]:
        """Nothing is ever held back."""
        return []
