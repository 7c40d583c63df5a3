"""The model as the scheduler sees it: protocols that a fake fulfils in tests.

The state of a running sequence, the plan of a step and a token that is still computed are opaque
here: the scheduler takes them from the model, and hands them back.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ..models.memory_profile import Held
from ..models.params import Row, Token

State: TypeAlias = Any
"""A running sequence's state. Of it the scheduler reads `suffix_length`: tokens of its own."""

Plan: TypeAlias = Any
"""A step as it is planned and priced."""

PendingToken: TypeAlias = Any
"""A token that may still be computed."""


class ForwardOutput(Protocol):
    """Logits that follow one token, or the last one, of some sequences."""

    @property
    def errors(self) -> dict[int, BaseException]:
        """Faults of single sequences, by their place."""
        ...


class SamplerOutput(Protocol):
    """Tokens that were sampled."""

    @property
    def errors(self) -> dict[int, BaseException]:
        """Faults of single sequences, by their place."""
        ...

    def pending(self, place: int) -> PendingToken:
        """Name a token, which may still be computed."""
        ...

    def read(self) -> list[Token]:
        """Wait for the tokens."""
        ...


class MemoryProfile(Protocol):
    """Sizes of sequences; `models.memory_profile.MemoryProfile` is the real one."""

    def kept(self, tokens: int) -> int:
        """Bytes of computed tokens once they are stored."""
        ...

    def start(self, tokens: int, context: int) -> Held:
        """Size of a sequence that has `tokens` of its `context` left to compute."""
        ...

    def worst_case(self, context: int) -> Held:
        """Upper bound of a sequence of this length, alone: what is admitted by it is served."""
        ...


class Placement(Protocol):
    """Where the state of sequences lies; `models.kv.placement.Placement` is the real one."""

    def capture(self, cache: State) -> Any:
        """Copy what is non-trimmable at a sequence's present offset: a checkpoint."""
        ...

    def lease(self, cache: State, spans: Any) -> None:
        """Have a sequence read its leased tokens from other spans."""
        ...

    def take_packed(self, cache: State) -> Sequence[Any]:
        """Pack all that a sequence does not lease, and hand the spans over, in order."""
        ...

    def replace_own(self, cache: State, spans: Any) -> None:
        """Have a sequence lease spans that hold what was packed of it."""
        ...

    def close(self, cache: State) -> None:
        """Give back what a sequence holds of a batch. Idempotent."""
        ...


class Opener(Protocol):
    """Makes the state of sequences."""

    @property
    def placement(self) -> Placement:
        """Where their state lies."""
        ...

    def open(self, offset: int, spans: Any, checkpoint: Any) -> State:
        """Make the state of a sequence that resumes at `offset`."""
        ...


class StepPlanner(Protocol):
    """Plans steps and prices them."""

    @property
    def profile(self) -> MemoryProfile:
        """Sizes of sequences."""
        ...

    def held_by(self, caches: Iterable[State]) -> Held:
        """Size of what running sequences have of their own."""
        ...

    def plan(
        self,
        decode: Sequence[State],
        prefill: tuple[State, int] | None,
        *,
        completes: bool,
        coming: int,
        may_copy: bool,
    ) -> Plan:
        """Plan a step.

        Args:
            decode: sequences that get a token each, in the order of these tokens.
            prefill: the sequence whose prompt advances, and by how many tokens.
            completes: that prompt is complete then.
            coming: number of sequences that will soon decode too.
            may_copy: state may be copied where the step could do without.
        """
        ...

    def cost(self, plan: Plan) -> Held:
        """Peak size of a plan, over what is held before it."""
        ...


class ModelRunner(Opener, StepPlanner, Protocol):
    """Runs a model as planned; `models.runner.ModelRunner` is the real one."""

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """Shapes of batches that were computed with."""
        ...

    @property
    def overlaps(self) -> bool:
        """True if the device computes while the host goes on."""
        ...

    @property
    def max_completing(self) -> int:
        """Tokens of a chunk that completes its prompt, at most."""
        ...

    def prefill(self, tokens: Sequence[int], cache: State) -> None:
        """Advance a sequence over tokens of its prompt, and wait until that is computed."""
        ...

    def complete(self, tokens: Sequence[int], cache: State) -> ForwardOutput:
        """Do so over the last tokens of its prompt; returns the logits of what follows."""
        ...

    def run(
        self, plan: Plan, caches: Sequence[State], tokens: Sequence[int | PendingToken]
    ) -> ForwardOutput:
        """Launch the model on a token of each sequence, as planned.

        Raises whatever the model raises for the batch as a whole: the states of all are lost.
        """
        ...

    def sample(self, output: Any, rows: Mapping[int, Row]) -> SamplerOutput:
        """Launch sampling for some of the sequences that ran, by their places."""
        ...
