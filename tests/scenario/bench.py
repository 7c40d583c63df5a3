"""An engine over a tiny real model, driven by hand, beside mlx-lm's own cold run."""

import itertools
import random
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from umbel.cachestore.check import problems
from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.ledger import Size
from umbel.cachestore.prefix_cache import PrefixCache
from umbel.cachestore.state import Layout
from umbel.models.backends import choose
from umbel.models.backends.base import Backend
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.params import SamplingParams
from umbel.models.runner import ModelRunner
from umbel.models.sampling import ForwardOutput
from umbel.models.step_plan import Call
from umbel.scheduler.engine import Engine
from umbel.scheduler.kv_cache_manager import KVCacheManager
from umbel.scheduler.memory import MemoryPlanner
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Event, Finished, FinishReason, Request, TokenEvent
from umbel.scheduler.sequence import Sequence

from .. import zoo
from ..models.batch_fixture import mlx_lm_alone
from ..placement_check import problems as problems_of_state
from ..shared import limited, measured_once, shared_model

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel

CHUNK = 64
INTERVAL = 128
LogProbs = NDArray[np.float32]

_CHOOSES_KEYS = ("deepseek_v32",)
_CUTS = (CHUNK, 48)
_cold: dict[tuple[str, int, tuple[int, ...], int], "Outcome"] = {}


@dataclass
class Outcome:
    """Result of one request.

    Attributes:
        logprobs: `[tokens, V]`, of every decode step.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogProbs] = field(default_factory=list)
    matched: int = 0
    cached: int = 0
    reason: FinishReason | None = None
    error: Exception | None = None

    @property
    def history(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.tokens


GREEDY = SamplingParams(seed=0, temperature=0.0)


@dataclass
class Ask:
    """A request to be sent.

    Attributes:
        at: the step at which it comes.
        cancel_after: steps after which its client leaves.
    """

    prompt: list[int]
    tokens: int
    at: int = 0
    sampling: SamplingParams = GREEDY
    boundaries: list[tuple[int, Reason]] = field(default_factory=list)
    cancel_after: int | None = None


class RecordingRunner(ModelRunner):
    """The real runner, which writes down the log-probabilities of every step."""

    def __init__(self, loaded: "LoadedModel", *, exact: bool = False) -> None:
        with measured_once(loaded.model):
            super().__init__(loaded, exact=exact)
        self.rows: list[int] = []
        self._by_state: dict[int, list[LogProbs]] = {}
        self._opened: list[SequenceCache] = []

    def open(self, *args: Any, **kwargs: Any) -> SequenceCache:
        """Open a state, and a list for what it will lead to."""
        cache = super().open(*args, **kwargs)
        self._opened.append(cache)  # so that no id is used twice
        self._by_state[id(cache)] = []
        return cache

    def written_of(self, cache: SequenceCache) -> list[LogProbs]:
        """Return the log-probabilities of one state so far; the list goes on growing."""
        return self._by_state[id(cache)]

    def _call(
        self,
        call: Call,
        caches: Items[SequenceCache],
        tokens: mx.array,
    ) -> mx.array:
        """Give a token to each and note what came of it."""
        logits = super()._call(call, caches, tokens)
        self.rows.append(len(caches))
        for row, cache in enumerate(caches):
            self.note(cache, logits[row])
        return logits

    def complete(self, tokens: Items[int], cache: SequenceCache) -> ForwardOutput:
        """Note what follows a prompt."""
        output = super().complete(tokens, cache)
        assert output.logits is not None
        self.note(cache, output.logits[0])
        return output

    def note(self, cache: SequenceCache, logits: mx.array) -> None:
        """Note what came of a state's token."""
        self._by_state[id(cache)].append(_log_softmax(logits))


class Bench:
    """One tiny model, its cache, and an engine that is stepped by hand.

    As which device it runs can be said; else it is this one, where a step is launched before
    the last one is read.
    """

    def __init__(
        self,
        name: str,
        *,
        budget: int = 1 << 30,
        kept: int = 4,
        max_batch: int = 16,
        exact: bool = False,
        memory: int = 1 << 40,
        device: Backend | None = None,
        seed: int = 0,
        prefill_chunk: int = CHUNK,
    ) -> None:
        model = shared_model(name, seed=seed) if seed else shared_model(name)
        loaded = cast(
            "LoadedModel",
            SimpleNamespace(
                model=model,
                layout=CacheLayout(model),
                text=SimpleNamespace(vocab_size=zoo.VOCAB_SIZE),
                backend=device or limited(choose(), overlaps=True),
            ),
        )
        self.model = model
        self._name, self._seed = name, seed
        self.runner = RecordingRunner(loaded, exact=exact)
        layers = loaded.layout
        self.exact, self.spans = layers.has_checkpoints, layers.has_spans
        layout = Layout(spans=self.spans, checkpoints=self.exact)
        self.cache = PrefixCache(
            layout, budget=budget, checkpoints_kept=kept, grid=CHUNK if exact else 1
        )
        self._queue = ConversationQueue(16)
        self._events: list[tuple[Sequence, Event]] = []
        kv_cache = KVCacheManager(self.runner, self.cache, interval=INTERVAL)
        self.cache.pool.resize(Size(memory, 1 << 40))
        self.engine = Engine(
            self.runner,
            kv_cache,
            MemoryPlanner(self.cache.pool, self.runner),
            self._queue,
            self._events.extend,
            eos_ids=frozenset(),
            prefill_chunk=prefill_chunk,
            max_batch=max_batch,
            exact=exact,
            max_stall=float("inf"),  # chunks must not depend on this machine's speed
        )
        self._numbers = itertools.count()

    def run(
        self,
        prompt: list[int],
        tokens: int,
        boundaries: Iterable[tuple[int, Reason]] = (),
        *,
        cancel_after: int | None = None,
    ) -> Outcome:
        """Serve one greedy request, or cancel it after some steps."""
        ask = Ask(list(prompt), tokens, boundaries=list(boundaries), cancel_after=cancel_after)
        (outcome,) = self.run_together([ask])
        assert outcome.error is None, outcome.error
        return outcome

    def run_together(self, asks: list["Ask"]) -> list[Outcome]:
        """Serve requests that come at the steps they say; the cache is sound after each step."""
        outcomes = [Outcome(list(ask.prompt)) for ask in asks]
        sequences = [Sequence(self._request(ask)) for ask in asks]
        by_id = {s.request.id: outcome for s, outcome in zip(sequences, outcomes, strict=True)}
        for step in itertools.count():
            for ask, sequence in zip(asks, sequences, strict=True):
                if ask.at == step:
                    self._queue.put(sequence)
                if ask.cancel_after is not None and step >= ask.at + ask.cancel_after:
                    sequence.cancelled = True
            self.engine.step()
            self._collect(by_id, sequences)
            assert problems(self.cache) == [], step
            caches = self.engine._kv_cache.caches.values()
            assert problems_of_state(self.runner.placement, caches) == [], step
            if all(outcome.reason for outcome in outcomes):
                break
        for outcome, sequence in zip(outcomes, sequences, strict=True):
            assert sequence.lease is not None
            assert not sequence.lease.open
            outcome.matched, outcome.cached = sequence.lease.matched, sequence.lease.cached
        return outcomes

    def _request(self, ask: "Ask") -> Request:
        number = next(self._numbers)
        return Request(
            id=f"r{number}",
            tenant="t",
            conversation=f"c{number}",
            prompt=ask.prompt,
            max_tokens=ask.tokens,
            sampling=ask.sampling,
            deadline=float("inf"),
            boundaries=ask.boundaries,
        )

    def cold(self, prompt: list[int], answer: list[int], chunk: int = CHUNK) -> Outcome:
        """Run mlx-lm's own caches over the same prompt, without umbel.

        Many requests are alike, so it is remembered.

        Args:
            prompt: the prompt.
            answer: what is fed after it, so that log-probabilities can be compared also
                beyond a first difference.
            chunk: tokens of it that are prefilled at once.
        """
        key, count = (self._name, self._seed, tuple(prompt), chunk), len(answer)
        known = _cold.get(key)
        if known is None or known.tokens[:count] != answer:
            known = _cold[key] = self._cold(prompt, answer, chunk)
        return Outcome(prompt, known.tokens[:count], known.logprobs[:count])

    def _cold(self, prompt: list[int], answer: list[int], chunk: int) -> Outcome:
        cache = make_prompt_cache(self.model)
        outcome = Outcome(prompt)
        with mlx_lm_alone(self.model):
            for start in range(0, len(prompt) - 1, chunk):
                end = min(start + chunk, len(prompt) - 1)
                self.model(mx.array([prompt[start:end]]), cache=cache)
                mx.eval([layer.state for layer in cache])
            for token in [prompt[-1], *answer[:-1]]:
                logits = self.model(mx.array([[token]]), cache=cache)[0, -1]
                outcome.logprobs.append(_log_softmax(logits))
                outcome.tokens.append(int(outcome.logprobs[-1].argmax()))
        return outcome

    def difference(self, outcome: Outcome) -> float:
        """Compare with cold runs: tokens must agree; returns the largest |Δ log p| to the nearer.

        Where keys are chosen by their scores (deepseek_v32), a near tie falls one way or the other
        by where a prompt is cut: mlx-lm's own log-probs are 1e-3 apart then. Other models are
        compared with one run, of chunks as the engine has them where nothing is restored.
        """
        chunks = _CUTS if self._name in _CHOOSES_KEYS else _CUTS[:1]
        runs = [self.cold(outcome.prompt, outcome.tokens, chunk) for chunk in chunks]
        assert outcome.tokens in [cold.tokens for cold in runs]
        return min(
            max(
                float(np.abs(a - b).max())
                for a, b in zip(outcome.logprobs, cold.logprobs, strict=True)
            )
            for cold in runs
        )

    def _collect(self, by_id: dict[str, Outcome], sequences: list[Sequence]) -> None:
        for sequence in sequences:
            cache = self.engine._kv_cache.caches.get(sequence)
            if cache is not None:
                by_id[sequence.request.id].logprobs = self.runner.written_of(cache)
        for sequence, event in self._events:
            outcome = by_id[sequence.request.id]
            if isinstance(event, TokenEvent):
                outcome.tokens.append(event.token)
            elif isinstance(event, Finished):
                outcome.reason, outcome.error = event.reason, event.error
        self._events.clear()


def words(count: int, seed: Any) -> list[int]:
    """Make up a piece of prompt."""
    rng = random.Random(str(seed))  # noqa: S311  (not a secret)
    return [rng.randrange(zoo.VOCAB_SIZE) for _ in range(count)]


def _log_softmax(logits: mx.array) -> LogProbs:
    return np.array(logits - mx.logsumexp(logits), np.float32)
