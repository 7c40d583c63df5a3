"""What the scheduler asks of a model.

What a model hands out has types of its own: `C` is a running sequence's state, `P` the plan of a
step, `O` what a step leads to, and `T` a token that may still be computed. The scheduler takes
them from the model and hands them back, and reads no more of them than their protocols say.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

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

    @property
    def errors(self) -> dict[int, BaseException]: ...  # noqa: D102  (described above)


C = TypeVar("C", bound=SequenceCache)
P = TypeVar("P")
O = TypeVar("O", bound=ForwardOutput)  # noqa: E741  (a letter, as its neighbours)
T = TypeVar("T")
S = TypeVar("S", bound=Span)
K = TypeVar("K", bound=Checkpoint)
T_co = TypeVar("T_co", covariant=True)
C_contra = TypeVar("C_contra", bound=SequenceCache, contravariant=True)
P_contra = TypeVar("P_contra", contravariant=True)
K_co = TypeVar("K_co", bound=Checkpoint, covariant=True)


class SamplerOutput(Protocol[T_co]):
    """Tokens that were sampled.

    Attributes:
        errors: what was raised for single sequences, by their place.
    """

    @property
    def errors(self) -> dict[int, BaseException]: ...  # noqa: D102  (described above)

    def pending(self, place: int) -> T_co:
        """Name a token, which may still be computed."""
        ...

    def read(self) -> list[Token]:
        """Wait for the tokens."""
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


class Placement(Protocol[C_contra, S, K_co]):
    """Where the state of sequences lies; `models.kv.placement.Placement` is the real one."""

    def capture(self, cache: C_contra) -> K_co:
        """Copy what is non-trimmable at a sequence's present offset."""
        ...

    def lease(self, cache: C_contra, spans: Sequence[S]) -> None:
        """Have a sequence read its leased tokens from other spans."""
        ...

    def take_packed(self, cache: C_contra) -> Sequence[S]:
        """Pack all that a sequence does not lease, and hand it over, in order."""
        ...

    def replace_own(self, cache: C_contra, spans: Sequence[S]) -> None:
        """Have a sequence lease spans that hold what was packed of it."""
        ...

    def close(self, cache: C_contra) -> None:
        """Give back what a sequence holds of a batch. Idempotent."""
        ...


class Opener(Protocol[C, S, K]):
    """Makes the state of sequences; `models.runner.ModelRunner` is the real one.

    Attributes:
        placement: where their state lies.
    """

    @property
    def placement(self) -> Placement[C, S, K]: ...  # noqa: D102  (described above)

    def open(self, offset: int, spans: Sequence[S], checkpoint: K | None) -> C:
        """Make the state of a sequence that resumes at `offset`."""
        ...


class StepPlanner(Protocol[C_contra, P]):
    """Plans steps and prices them; `models.runner.ModelRunner` is the real one.

    Attributes:
        profile: what sequences take.
    """

    @property
    def profile(self) -> MemoryProfile: ...  # noqa: D102  (described above)

    def held_by(self, caches: Iterable[C_contra]) -> Held:
        """What running sequences have of their own."""
        ...

    def plan(
        self,
        decode: Sequence[C_contra],
        prefill: tuple[C_contra, int] | None,
        *,
        completes: bool,
        coming: int,
        may_copy: bool,
    ) -> P:
        """Plan a step.

        Args:
            decode: sequences that get a token each, in the order of these tokens.
            prefill: the sequence whose prompt advances, and by how many tokens.
            completes: that prompt is complete then.
            coming: how many more will soon get a token each, with those that do now.
            may_copy: state may be copied where the step could do without.
        """
        ...

    def cost(self, plan: P) -> Held:
        """What a plan takes at its peak, over what is held before it."""
        ...


class ModelRunner(Protocol[C_contra, P_contra, O, T]):
    """Runs a model as planned; `models.runner.ModelRunner` is the real one.

    Attributes:
        shapes: shapes of batches that were computed with.
        overlaps: whether the device computes while the host goes on.
        max_completing: tokens of a chunk that completes its prompt, at most.
    """

    @property
    def shapes(self) -> set[tuple[int, ...]]: ...  # noqa: D102  (described above)
    @property
    def overlaps(self) -> bool: ...  # noqa: D102  (described above)
    @property
    def max_completing(self) -> int: ...  # noqa: D102  (described above)

    def prefill(self, tokens: Sequence[int], cache: C_contra) -> None:
        """Advance a sequence over tokens of its prompt, and wait until that is computed."""
        ...

    def complete(self, tokens: Sequence[int], cache: C_contra) -> O:
        """Do so over the last tokens of its prompt; returns the logits of what follows."""
        ...

    def run(
        self,
        plan: P_contra,
        caches: Sequence[C_contra],
        tokens: Sequence[int | T],
    ) -> O:
        """Launch the model on a token of each sequence, as planned.

        A token is an id, or one that is still computed. Raises whatever the model raises for the
        batch as a whole: the states of all are lost.
        """
        ...

    def sample(self, output: O, rows: Mapping[int, Row]) -> SamplerOutput[T]:
        """Launch sampling for some of the sequences that ran, by their places."""
        ...
