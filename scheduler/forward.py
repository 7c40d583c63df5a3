"""What the engine asks of a model."""

from collections.abc import Iterable
from typing import Any, Protocol

from ..models.params import Row, Token


class Fed(Protocol):
    """What came of feeding; `models.forward.Fed` is the real one.

    Attributes:
        errors: what was raised for single entries, by their number.
    """

    errors: dict[int, BaseException]


class Choice(Protocol):
    """Tokens that were chosen; `models.sampling.Choice` is the real one.

    Attributes:
        errors: what was raised for single rows, by their place.
    """

    errors: dict[int, BaseException]

    def read(self) -> list[Token]:
        """Wait for the tokens."""
        ...


class Forward(Protocol):
    """What the engine asks of a model; `models.forward.Forward` is the real one.

    Attributes:
        shapes: shapes of batches that were computed with.
        overlaps: whether the device computes while the host goes on.
    """

    shapes: set[tuple[int, ...]]
    overlaps: bool

    def held_by(self, states: Iterable[Any]) -> tuple[int, int]:
        """What running sequences have of their own: bytes, and allocations."""
        ...

    def kept_bytes(self, tokens: int) -> int:
        """What tokens that were computed take once they are stored, in bytes."""
        ...

    def start_need(self, tokens: int, context: int) -> tuple[int, int]:
        """What a sequence takes that has `tokens` of its `context` left to compute."""
        ...

    def promise(self, context: int) -> tuple[int, int]:
        """What a sequence of this length was promised to be served with, alone."""
        ...

    def chunk_need(self, tokens: int, states: Any) -> tuple[int, int]:
        """What prefilling so many tokens takes at its peak."""
        ...

    def step_need(self, states: list[Any]) -> tuple[int, int]:
        """What a decode step takes at its peak."""
        ...

    def prefill(self, tokens: list[int], states: Any) -> None:
        """Advance `states` over `tokens`."""
        ...

    def feed(self, entries: list[tuple[Any, Any]]) -> Fed:
        """Launch the model on a token of each state. A token is an id, or one still computed.

        Raises whatever the model raises for all of them.
        """
        ...

    def choose(self, fed: Any, rows: dict[int, Row]) -> Choice:
        """Launch the choice of tokens for some of what was fed, by their numbers."""
        ...

    def drawn(self, choice: Any, index: int) -> Any:
        """Name a token that was chosen and may still be computed."""
        ...
