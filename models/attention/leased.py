"""What a batch's step reads of stored state, as arguments of a compiled function.

The function then holds none of it: who leaves takes what it leased along, and the same function
serves whoever comes, as long as as much is read in the same way.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import mlx.core as mx

from ..kv.span_run import SpanRun
from ..kv.token_layer import Tensors
from .batched import Shared, Step
from .splits import Splits


class _Run(NamedTuple):
    """Stands for a `SpanRun` while a step is traced."""

    length: int
    layers: Sequence[Tensors]

    def layer(self, index: int) -> Tensors:
        return self.layers[index]


class _Stack(NamedTuple):
    """Stands for a `SpanStack`."""

    layers: Sequence[Tensors]
    mask: mx.array | None

    def layer(self, index: int) -> Tensors:
        return self.layers[index]


class _Source(NamedTuple):
    """Stands for what `Splits` reads."""

    starts: Sequence[Tensors]

    def start_of(self, index: int) -> Tensors:
        return self.starts[index]


class Leased:
    """What a step's rows lease: in which form they read it, and its arrays.

    Args:
        step: of the batch.
        layers: how many layers spans hold.
    """

    def __init__(self, step: Step, layers: int) -> None:
        self._step = step
        self._layers = range(layers)
        self._form: tuple[int, Hashable] = (-1, None)  # of which plan

    @property
    def form(self) -> Hashable:
        """All that a step's operations depend on, besides its arrays: equal forms, equal steps."""
        if self._form[0] != self._step.plan:
            self._form = self._step.plan, self._form_now()
        return self._form[1]

    def _form_now(self) -> Hashable:
        step, runs = self._step, self._runs()
        number = {id(run): place for place, run in enumerate(runs)}

        def read(runs: Sequence[SpanRun]) -> tuple[int, ...]:
            return tuple(number[id(run)] for run in runs)

        def shared(groups: Sequence[Shared]) -> tuple[Hashable, ...]:
            return tuple((read(runs), _count(members)) for runs, members in groups)

        return (
            tuple(run.length for run in runs),
            shared(step.shared),
            tuple((slot, read(runs)) for slot, runs in step.private.items()),
            tuple(
                (tuple(stack.layer(0)[0].shape), stack.mask is None, _count(members))
                for stack, members in step.stacks
            ),
            *(step.of_stacks is None, step.of_private is None),
            # Wherever it lies, and however much it is.
            None if step.splits is None else step.splits.table.shape,
        )

    def _runs(self) -> list[SpanRun]:
        """All runs, each once."""
        step = self._step
        groups = [*[runs for runs, _ in step.shared], *step.private.values()]
        each = {id(run): run for runs in groups for run in runs}
        return list(each.values())

    def arrays(self) -> list[mx.array]:
        """All of them, in an order that depends on the form alone.

        They are not kept here: what lies elsewhere by the next step must be free then.
        """
        found: list[mx.array] = []

        def take(array: mx.array) -> mx.array:
            found.append(array)
            return array

        self._fields(take)
        return found

    @contextmanager
    def tracing(self, arrays: Sequence[mx.array]) -> Iterator[None]:
        """Have layers read other arrays, which stand for these.

        Args:
            arrays: as many as `arrays` gives.
        """
        left = iter(arrays)
        standing = self._fields(lambda _: next(left))
        held = {name: getattr(self._step, name) for name in standing}
        vars(self._step).update(standing)
        try:
            yield
        finally:
            vars(self._step).update(held)

    def _fields(self, take: Callable[[mx.array], mx.array]) -> dict[str, Any]:
        """The step's fields that say what is read, with what `take` gives for each array."""
        step = self._step

        def layers(of: Any) -> list[Tensors]:
            return [tuple(map(take, of.layer(index))) for index in self._layers]

        def other(array: mx.array | None) -> mx.array | None:
            return None if array is None else take(array)

        runs = {id(run): _Run(run.length, layers(run)) for run in self._runs()}

        def read(real: Sequence[SpanRun]) -> list[SpanRun]:
            return [cast("SpanRun", runs[id(run)]) for run in real]

        def shared(groups: Sequence[Shared]) -> list[Shared]:
            return [(read(real), other(members)) for real, members in groups]

        return {
            "shared": shared(step.shared),
            "private": {slot: read(real) for slot, real in step.private.items()},
            "stacks": [
                (_Stack(layers(stack), other(stack.mask)), other(members))
                for stack, members in step.stacks
            ],
            "of_stacks": other(step.of_stacks),
            "of_private": other(step.of_private),
            "splits": None if step.splits is None else self._splits(step.splits, take),
        }

    def _splits(self, splits: Splits, take: Callable[[mx.array], mx.array]) -> Splits:
        """The same with other arrays: as many of them, however many sources are the same."""
        standing = [
            _Source([tuple(map(take, source.start_of(index))) for index in self._layers])
            for source in splits.sources
        ]
        return Splits(standing, take(splits.table))


def _count(members: mx.array | None) -> int | None:
    return None if members is None else members.size
