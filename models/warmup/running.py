"""Runs scenarios on a model, within bounds of memory and time."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..attention.planned import Kind, Shape
from ..kv.packed import PackedCheckpoint, PackedSpan
from ..kv.sequence_cache import SequenceCache
from ..kv.stored import DiskCodec
from ..outputs import ForwardOutput, NextToken, SamplerOutput
from ..params import Row
from ..runner import ModelRunner
from .scenarios import Decode, Event, NextTurn, Prompts, Scenario, Start

_WORDS = range(8)  # tokens that all prompts consist of


class BoundError(Exception):
    """What comes next would exceed a bound, which the message names."""


class Bounds(NamedTuple):
    """What a warm-up may take.

    Attributes:
        rows: sequences that run at once.
        nbytes: of state and of computing, together.
        chunk: tokens of a prompt that are computed at once.
        until: when no further step is begun, on the clock.
    """

    rows: int
    nbytes: int
    chunk: int
    until: float


class _Stored(NamedTuple):
    """What is stored of a prompt, and how many tokens that is."""

    tokens: int
    spans: list[PackedSpan]
    checkpoint: PackedCheckpoint | None


@dataclass(eq=False)
class _Agent:
    """A running sequence.

    Attributes:
        own: spans that it alone leases.
        token: its next one.
    """

    cache: SequenceCache
    own: list[PackedSpan]
    token: NextToken = _WORDS[0]


class ScenarioRunner:
    """Runs scenarios, one after the other.

    Attributes:
        steps: how many decode steps were run.
        plans: how many shapes of attention were computed for the sake of their plans.

    Args:
        runner: of the model. Nothing may run on it.
        bounds: of memory and time.
        clock: seconds, monotonic.
        go_on: called before each step; what it raises ends the warm-up.
    """

    def __init__(
        self,
        runner: ModelRunner,
        bounds: Bounds,
        clock: Callable[[], float],
        go_on: Callable[[], object],
    ) -> None:
        self.steps = self.plans = 0
        self._runner = runner
        self._bounds = bounds
        self._clock = clock
        self._go_on = go_on
        self._served = runner.rules
        self._codec = DiskCodec(host_reads=runner.device.host_reads)
        self._captures = bool(runner.open().non_trimmable)
        self._agents: list[_Agent] = []
        self._prompts: dict[tuple[int, ...], _Stored] = {}
        self._sampled = SamplerOutput.empty()
        self._numbers = itertools.count()  # of its steps

    def run(self, scenario: Scenario) -> None:
        """Run one. Nothing is left of it, however it ends.

        Raises:
            BoundError: it would exceed a bound.
        """
        self._runner.use(scenario.rules(self._served))
        self._numbers = itertools.count()
        try:
            for event in scenario.events:
                self._happen(event)
            self._sampled.read()  # nothing computes any more
        finally:
            self._end(len(self._agents))
            self._prompts, self._sampled = {}, SamplerOutput.empty()
            self._runner.use(self._served)

    def plan_attention(self, kinds: Iterable[Kind], shapes: Sequence[Shape]) -> None:
        """Compute attention of these kinds in these shapes, for which a kernel is planned each.

        Raises:
            BoundError: the next one would exceed a bound.
        """
        for shape, kind in itertools.product(shapes, kinds):
            self._allow(kind.nbytes(shape))
            mx.eval(kind.compute(shape))
            self.plans += 1

    def plan_decoding(self, kinds: Iterable[Kind], rooms: Sequence[int]) -> None:
        """Compute attention of these kinds where one decodes alone, with caches of these rooms.

        Raises:
            BoundError: the next one would exceed a bound.
        """
        for room, kind in itertools.product(rooms, [kind for kind in kinds if kind.rows == 1]):
            self._allow(kind.nbytes(Shape(1, room)))
            kind.decode(room)
            self.plans += 1

    def _happen(self, event: Event) -> None:
        match event:
            case Start():
                for _ in range(min(event.sequences, self._bounds.rows - len(self._agents))):
                    self._prefill(self._start(event), event.prompt)
            case Prompts():
                self._together([agent.cache for agent in self._agents], event)
            case Decode():
                for left in reversed(range(event.steps if self._agents else 0)):
                    self._decode(event, 0 if left else event.end)
                self._end(event.end)
            case NextTurn():
                for agent in self._agents[: event.sequences]:
                    self._resume(agent, event.prompt)

    # -- events ------------------------------------------------------------------------

    def _start(self, event: Start) -> SequenceCache:
        lengths = (event.beginning,) * event.shared
        shared = self._prompt(lengths).spans
        prompt = self._prompt(lengths + event.spans)
        alone = prompt.spans[len(shared) :]
        self._allow(sum(span.nbytes for span in alone))
        own = [span.copy(0, span.length) for span in alone]
        cache = self._runner.open(prompt.tokens, [*shared, *own], prompt.checkpoint)
        self._agents.append(_Agent(cache, own))
        return cache

    def _prompt(self, lengths: tuple[int, ...]) -> _Stored:
        """Compute a prompt, and store it as spans of so many tokens."""
        if not lengths:
            return _Stored(0, [], None)
        if lengths not in self._prompts:
            before = self._prompt(lengths[:-1])
            cache = self._runner.open(*before)
            self._prefill(cache, lengths[-1])
            spans, checkpoint = self._store(cache)
            self._prompts[lengths] = _Stored(cache.offset, [*before.spans, *spans], checkpoint)
        return self._prompts[lengths]

    def _decode(self, event: Decode, end: int) -> None:
        """Run, sample for those who go on, and read the tokens of the step before.

        The order is another one in each step of a scenario.
        """
        first = next(self._numbers) % len(self._agents)
        agents = self._agents[first:] + self._agents[:first]
        caches = [agent.cache for agent in agents]
        plan = self._runner.plan(caches)
        self._allow(self._runner.cost(plan).nbytes)
        output = self._runner.run(plan, caches, [agent.token for agent in agents])
        ending = self._agents[:end]
        going = {place: agent for place, agent in enumerate(agents) if agent not in ending}
        sampled = self._runner.sample(output, _rows(event, output, going))
        for number, agent in enumerate(going.values()):
            agent.token = sampled.pending(number)
        self._sampled.read()
        self._sampled = sampled
        self.steps += 1

    def _resume(self, agent: _Agent, prompt: int) -> None:
        """Store a sequence as at the end of its request, and resume it as the next one does."""
        placement, cache = self._runner.placement, agent.cache
        shared = cache.leased[: len(cache.leased) - len(agent.own)]
        spans, checkpoint = self._store(cache)
        placement.close(cache)
        agent.own += spans
        self._join(agent.own)
        cache = self._runner.open(cache.offset, [*shared, *agent.own], checkpoint)
        agent.cache, agent.token = cache, _WORDS[0]
        self._prefill(cache, prompt)
        agent.own += self._pack(cache)
        placement.replace_own(cache, [*shared, *agent.own])

    def _end(self, count: int) -> None:
        for agent in self._agents[:count]:
            self._runner.placement.close(agent.cache)
        del self._agents[:count]

    # -- what takes memory -------------------------------------------------------------

    def _prefill(self, cache: SequenceCache, tokens: int) -> None:
        for done in range(0, tokens, self._bounds.chunk):
            self._compute([(cache, min(tokens - done, self._bounds.chunk))])

    def _together(self, caches: list[SequenceCache], prompts: Prompts) -> None:
        """Advance prompts in one call, where the model allows that."""
        chunks = [(cache, prompts.tokens + n * prompts.more) for n, cache in enumerate(caches)]
        for call in [chunks] if self._runner.prefills_together else [[chunk] for chunk in chunks]:
            self._compute(call)

    def _compute(self, chunks: list[tuple[SequenceCache, int]]) -> None:
        self._allow(self._runner.cost(self._runner.plan([], chunks)).nbytes)
        words = itertools.cycle(_WORDS)
        self._runner.prefill(
            [(list(itertools.islice(words, count)), cache) for cache, count in chunks]
        )

    def _store(self, cache: SequenceCache) -> tuple[list[PackedSpan], PackedCheckpoint | None]:
        """Pack what a sequence does not lease, and capture what is not packed."""
        checkpoint = None
        if self._captures:
            self._allow(self._runner.profile.captured(cache.offset).nbytes)
            checkpoint = self._runner.placement.capture(cache)
            self._codec.export_checkpoint(checkpoint)
        return self._pack(cache), checkpoint

    def _pack(self, cache: SequenceCache) -> list[PackedSpan]:
        self._allow(2 * self._runner.profile.kept(cache.suffix_length))
        return self._runner.placement.take_packed(cache)

    def _join(self, spans: Sequence[PackedSpan]) -> None:
        """Lay spans side by side, and read a part of that as who writes files does."""
        if spans:
            self._allow(sum(span.nbytes for span in spans))
            spans[0].join(spans[1:])
            self._codec.export_span(spans[0], 0, spans[0].length - 1)

    def _allow(self, nbytes: int) -> None:
        """Check that so many bytes more are within the bounds.

        Raises:
            BoundError: they are not, or the time is over.
        """
        self._go_on()
        if self._clock() >= self._bounds.until:
            raise BoundError("time")
        if self._held() + nbytes > self._bounds.nbytes:
            raise BoundError("memory")

    def _held(self) -> int:
        """Bytes of all that is there."""
        prompts = self._prompts.values()
        spans = {span for prompt in prompts for span in prompt.spans}
        spans |= {span for agent in self._agents for span in agent.own}
        held = self._runner.held_by(agent.cache for agent in self._agents).nbytes
        held += sum(prompt.checkpoint.nbytes for prompt in prompts if prompt.checkpoint)
        return held + sum(span.nbytes for span in spans)


def _rows(event: Decode, output: ForwardOutput, places: Iterable[int]) -> dict[int, Row]:
    """How those in these places sample."""
    if output.logits is None:
        return {}
    mask = np.full(-(-output.logits.shape[-1] // 32), 2**32 - 1, np.uint32)
    params = itertools.cycle(event.sampling)
    return {
        place: Row(next(params), _WORDS, _WORDS, mask if event.masked else None) for place in places
    }
