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
    """A call begins.

    Attributes:
        call: 0 for the answer's first call, 1 for the second.
        name: the tool's.
        id: what the model itself calls it, if its way of writing calls has ids.
    """

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
