"""A bench whose requests can be cancelled at any moment, and what must be true afterwards."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest

from umbel.cachestore.check import problems
from umbel.cachestore.checkpoints import Reason
from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.planner import Rules
from umbel.scheduler.request import Event, Finished, FinishReason, Started, TokenEvent
from umbel.scheduler.sequence import Sequence, SequenceStatus

from ..fakes import busy
from ..placement_check import problems as problems_of_state
from ..scenario import bench
from ..scenario.bench import Ask, Bench, LogProbs, Outcome, words
from ..scenario.test_exactness import TOLERANCE

NAMES = ("llama", "qwen3_next", "gemma3_text", "deepseek_v3")
"""Keys only; keys and recurrent arrays; keys and rings; latents."""

SYSTEM = words(150, "system")
LEFT_OVER = 64 * 1024
"""Bytes that may be held more than before the first request, when all is over."""

MAX_BATCH = 6
_PATIENCE = 2000  # steps in which whatever is waited for must have come about
_AGAIN = words(5, "again")


class PatientRunner(bench.RecordingRunner):
    """Notes logits without waiting for them, so that what is launched is really under way."""

    def __init__(self, loaded: Any, *, exact: bool = False) -> None:
        super().__init__(loaded, exact=exact)
        self._noted: list[tuple[SequenceCache, mx.array]] = []

    def note(self, cache: SequenceCache, logits: mx.array) -> None:
        """Note what will come of a state's token."""
        self._noted.append((cache, logits))

    def written_of(self, states: SequenceCache) -> list[LogProbs]:
        """Effects of one state; waits for noted events."""
        for noted, logits in self._noted:
            super().written_of(noted).append(bench._log_softmax(logits))
        self._noted = []
        return super().written_of(states)

    def forget(self) -> None:
        """Drop all notes, and with them the states."""
        self._noted = []
        self.rows.clear()
        self._by_state.clear()
        self._opened.clear()


class EngineHarness(Bench):
    """A bench that is driven step by step. Requests go by their ids, so that it owns them.

    Attributes:
        live: the requests that were sent since the last `close`.
    """

    _made: ClassVar[dict[tuple[str, int, int, bool], Self]] = {}

    def __init__(self, name: str, budget: int, *, exact: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench, "RecordingRunner", PatientRunner)
            super().__init__(name, max_batch=MAX_BATCH, budget=budget, exact=exact)
        self.live: dict[str, Sequence] = {}
        self._history: dict[str, list[Event]] = {}
        self._states: dict[str, SequenceCache] = {}
        self._prefilled_before = 0
        self._before = memory()

    @classmethod
    @contextmanager
    def of(
        cls,
        name: str,
        budget: int = 1 << 30,
        *,
        row: int = Rules().least_class,
        exact: bool = False,
    ) -> Iterator[Self]:
        """Lend a harness, the same one as before unless something went wrong with that.

        Args:
            name: of the model.
            budget: bytes of cache.
            row: own tokens of a row in the first length class.
            exact: see `Engine`.
        """
        key = name, budget, row, exact
        harness = cls._made.pop(key, None) or cls(name, budget, exact=exact)
        if harness.runner.rules.least_class != row:
            harness.runner.use(replace(harness.runner.rules, least_class=row))
        harness._before = mx.get_active_memory()  # of other harnesses too
        yield harness
        harness.close()
        cls._made[key] = harness

    # -- requests ----------------------------------------------------------------------

    def send(self, prompt: list[int], tokens: int) -> str:
        """Queue a request; returns its id."""
        boundaries = [(len(SYSTEM), Reason.SYSTEM)] if prompt[: len(SYSTEM)] == SYSTEM else []
        sequence = Sequence(self._request(Ask(prompt, tokens, boundaries=boundaries)))
        self._queue.put(sequence)
        self.live[sequence.request.id] = sequence
        self._history[sequence.request.id] = []
        return sequence.request.id

    def agents(self, *tokens: int) -> list[str]:
        """Queue agents of one system prompt, with answers of these lengths."""
        users = [words(5 + 9 * i, f"user {i}") for i in range(len(tokens))]
        return [self.send([*SYSTEM, *u], t) for u, t in zip(users, tokens, strict=True)]

    def cancel(self, *names: str) -> None:
        """Cancel as the hand-off does; after the next step nothing may be left of them.

        They are told what was read until then, which their step may have kept, and their end.
        """
        for name in names:
            self.live[name].cancelled = True
            self._queue.remove(name)
        told = {name: len(self._history[name]) for name in names}
        read = {name: list(self.live[name].output) for name in names}
        self.step()
        for name in names:
            sequence, said = self.live[name], self._history[name][told[name] :]
            began = sequence.status is not SequenceStatus.WAITING
            assert said[-1:] == [Finished(FinishReason.CANCELLED)] * began, said
            assert all(isinstance(event, TokenEvent) for event in said[:-1]), said
            assert self._tokens(name) == read[name]
            assert sequence not in self.engine._kv_cache.caches
            assert sequence.lease is None or not sequence.lease.open
            assert (sequence.request.tenant, sequence.request.conversation) not in busy(self._queue)

    def running(self) -> list[str]:
        """Ids of running sequences."""
        return [sequence.request.id for sequence in self.engine._scheduler.running]

    def decoding(self, *names: str, tokens: int = 1) -> bool:
        """True if they run and have made as many tokens."""
        return all(
            self.live[name].status is SequenceStatus.DECODE
            and len(self.live[name].output) >= tokens
            for name in names
        )

    def prefilled(self) -> int:
        """How many prompt tokens were computed since the last `close`."""
        return self.engine.statistics().prefill_tokens - self._prefilled_before

    def slots(self) -> dict[str, int]:
        """Which sequence has which row of the batch."""
        names = {id(cache): name for name, cache in self._states.items()}
        placed = self.runner.placement.sequences
        return {names[id(cache)]: slot for slot, cache in placed.items()}

    # -- steps -------------------------------------------------------------------------

    def step(self, count: int = 1) -> None:
        """Do steps; after each the cache is sound, and ended sequences hold nothing."""
        for _ in range(count):
            self.engine.step()
            for sequence, event in self._events:
                self._history[sequence.request.id].append(event)
                if isinstance(event, Started):  # in the order in which states were opened
                    opened = self.runner._opened[len(self._states)]
                    self._states[sequence.request.id] = opened
            self._events.clear()
            assert problems(self.cache) == []
            caches = self.engine._kv_cache.caches.values()
            assert problems_of_state(self.runner.placement, caches) == []
            assert set(self.slots()) <= set(self.running())
            leases = {id(sequence.lease) for sequence in self.engine._scheduler.running}
            assert {id(lease) for lease in self.cache.leases} == leases

    def until(self, condition: Callable[[], bool]) -> None:
        """Do steps until something is so."""
        for _ in range(_PATIENCE):
            if condition():
                return
            self.step()
        raise AssertionError("it never came about")

    # -- the end -----------------------------------------------------------------------

    def finish(self) -> None:
        """Serve all to their ends: those that stayed, and again those that were cancelled.

        Everybody's answer is a cold run's, also over what a cancelled request has left.
        """
        self.until(lambda: not self.running() and not len(self._queue))
        left = [
            s.computed.tolist() for s in self.live.values() if s.cancelled and s.num_computed_tokens
        ]
        self._check_answers()
        again = {self.send([*computed, *_AGAIN], 4): len(computed) for computed in left}
        self.until(lambda: not self.running() and not len(self._queue))
        for name, known in again.items():
            if not self.exact and self.cache.grid == 1 and self.cache.budget > 1 << 20:
                started = self.live[name].started
                assert started is not None
                assert started.cached >= known
        self._check_answers()

    def _check_answers(self) -> None:
        for name, sequence in self.live.items():
            outcome = self._outcome(name)
            if outcome.tokens:
                assert self.difference(outcome) < TOLERANCE, name
            if not sequence.cancelled:
                assert outcome.reason is FinishReason.LENGTH, outcome.error
                assert len(outcome.tokens) == sequence.request.max_tokens

    def _tokens(self, name: str) -> list[int]:
        return [e.token for e in self._history[name] if isinstance(e, TokenEvent)]

    def _outcome(self, name: str) -> Outcome:
        outcome = Outcome(self.live[name].request.prompt)
        outcome.tokens = self._tokens(name)
        for event in self._history[name]:
            if isinstance(event, Finished):
                assert outcome.reason is None
                outcome.reason, outcome.error = event.reason, event.error
        if name in self._states:
            written = self.runner.written_of(self._states[name])
            outcome.logprobs = written[: len(outcome.tokens)]  # the last may be unread
        return outcome

    def close(self) -> None:
        """Forget all requests and the cache: then the memory is what it was before them."""
        assert self.running() == []
        assert len(self._queue) == 0
        assert len(self._queue._claimed) == 0
        assert self.cache.tries.statistics().leases == 0
        gone = [weakref.ref(sequence) for sequence in self.live.values()]
        for notes in (self.live, self._history, self._states):
            cast("dict[str, Any]", notes).clear()
        cast("PatientRunner", self.runner).forget()
        self._prefilled_before = self.engine.statistics().prefill_tokens
        self.cache.clear()
        assert self.cache.tries.size.nbytes == 0
        assert memory() - self._before <= LEFT_OVER, memory() - self._before
        assert [ref for ref in gone if ref() is not None] == []


def memory() -> int:
    """Bytes that MLX holds, after all garbage is gone."""
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()
