"""What the engine asks of a model."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ..cachestore.state import Checkpoint, Span
from ..models.memory_profile import Held
from ..models.params import Row, Token


class SequenceCache(Protocol):
    """A running sequence's state, which only its runner reads and writes.

    Attributes:
        suffix_length: tokens whose state it has of its own, where that still grows.
    """

    @property
    def suffix_length(self) -> int: ...  # noqa: D102  (described above)


class ForwardOutput(Protocol):
    """What came of one token each of some sequences.

    Attributes:
        errors: what was raised for single sequences, by their place.
    """

    errors: dict[int, BaseException]


class SamplerOutput(Protocol):
    """Tokens that were sampled.

    Attributes:
        errors: what was raised for single sequences, by their place.
    """

    errors: dict[int, BaseException]

    def read(self) -> list[Token]:
        """Wait for the tokens."""
        ...


class StepPlan(Protocol):
    """What one step does; `models.step_plan.StepPlan` is the real one.

    Attributes:
        decode: how sequences get a token each; None if none does.
    """

    @property
    def decode(self) -> Any: ...  # noqa: D102  (described above)


class Placement(Protocol):
    """Where the state of sequences lies; `models.kv.placement.Placement` is the real one."""

    def capture(self, cache: Any) -> Checkpoint:
        """Copy what is non-trimmable at a sequence's present offset."""
        ...

    def lease(self, cache: Any, spans: Any) -> None:
        """Have a sequence read its leased tokens from other spans."""
        ...

    def take_packed(self, cache: Any) -> Sequence[Span]:
        """Pack all that a sequence does not lease, and hand it over, in order."""
        ...

    def replace_own(self, cache: Any, spans: Any) -> None:
        """Have a sequence lease spans that hold what was packed of it."""
        ...

    def close(self, cache: Any) -> None:
        """Give back what a sequence holds of a batch. Idempotent."""
        ...

    def forget_copies(self) -> bool:
        """Free what is held twice only to be read faster; whether there was any."""
        ...


class ModelRunner(Protocol):
    """Runs a model; `models.runner.ModelRunner` is the real one.

    Attributes:
        shapes: shapes of batches that were computed with.
        overlaps: whether the device computes while the host goes on.
        profile: what sequences take.
        placement: where their state lies.
    """

    shapes: set[tuple[int, ...]]
    overlaps: bool

    @property
    def profile(self) -> "MemoryProfile": ...  # noqa: D102  (described above)
    @property
    def placement(self) -> Placement: ...  # noqa: D102  (described above)

    def held_by(self, caches: Iterable[Any]) -> Held:
        """What running sequences have of their own."""
        ...

    def plan(
        self, decode: Sequence[Any], prefill: tuple[Any, int] | None, *, may_copy: bool
    ) -> StepPlan:
        """Plan a step.

        Args:
            decode: sequences that get a token each, in the order of these tokens.
            prefill: a sequence whose prompt advances, and by how many tokens.
            may_copy: state may be copied where the step could do without.
        """
        ...

    def cost(self, plan: Any) -> Held:
        """What a plan takes at its peak, over what is held before it."""
        ...

    def prefill(self, tokens: Sequence[int], cache: Any) -> None:
        """Advance a sequence over tokens."""
        ...

    def run(self, plan: Any, caches: Sequence[Any], tokens: Sequence[Any]) -> ForwardOutput:
        """Launch the model on a token of each sequence, as planned.

        A token is an id, or one that is still computed. Raises whatever the model raises for
        the batch as a whole.
        """
        ...

    def sample(self, output: Any, rows: dict[int, Row]) -> SamplerOutput:
        """Launch sampling for some of the sequences that ran, by their places."""
        ...

    def pending(self, output: Any, place: int) -> Any:
        """Name a token that was sampled and may still be computed."""
        ...


class MemoryProfile(Protocol):
    """What sequences take; `models.memory_profile.MemoryProfile` is the real one."""

    def kept(self, tokens: int) -> int:
        """What tokens that were computed take once they are stored, in bytes."""
        ...

    def start(self, tokens: int, context: int) -> Held:
        """What a sequence takes that has `tokens` of its `context` left to compute."""
        ...

    def worst_case(self, context: int) -> Held:
        """What a sequence of this length may take, alone: what is admitted by it is served."""
        ...
