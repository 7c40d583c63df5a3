"""An engine over a tiny real model, driven by hand, beside mlx-lm's own cold run."""

import itertools
import random
from collections.abc import Iterable
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
from umbel.cachestore.prefix_cache import Layout, PrefixCache
from umbel.models.forward import Forward
from umbel.models.layer_states import LayerStack, LiveStates
from umbel.models.params import SamplingParams
from umbel.scheduler.engine import Engine
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Event, Finished, FinishReason, Request, TokenEvent
from umbel.scheduler.reuse import PrefixReuse
from umbel.scheduler.sequence import Sequence

from .. import zoo

if TYPE_CHECKING:
    from umbel.models.loader import LoadedModel

CHUNK = 64
INTERVAL = 128
LogProbs = NDArray[np.float32]


@dataclass
class Outcome:
    """What one request came to.

    Attributes:
        logprobs: `[tokens, V]`, of every decode step.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogProbs] = field(default_factory=list)
    matched: int = 0
    cached: int = 0
    reason: FinishReason | None = None

    @property
    def history(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.tokens


class RecordingForward(Forward):
    """The real forward, which writes down the log-probabilities of every step."""

    written: list[LogProbs]

    def logits(self, token: int, states: LiveStates) -> mx.array:
        """Feed one token and note what came of it."""
        logits = super().logits(token, states)
        self.written.append(_log_softmax(logits[0]))
        return logits


class Bench:
    """One tiny model, its cache, and an engine that is stepped by hand."""

    def __init__(self, name: str, *, budget: int = 1 << 30, kept: int = 4) -> None:
        model = zoo.make(name)
        stack = LayerStack(model)
        loaded = cast(
            "LoadedModel",
            SimpleNamespace(
                model=model, stack=stack, text=SimpleNamespace(vocab_size=zoo.VOCAB_SIZE)
            ),
        )
        self.model = model
        self.forward = RecordingForward(loaded)
        self.exact = stack.has_checkpoints
        self.spans = stack.has_spans
        layout = Layout(spans=stack.has_spans, checkpoints=stack.has_checkpoints)
        self.cache = PrefixCache(layout, budget=budget, checkpoints_kept=kept)
        self._queue = ConversationQueue(16)
        self._events: list[tuple[Sequence, Event]] = []
        reuse = PrefixReuse(self.forward, self.cache, fingerprint="f", interval=INTERVAL)
        self.engine = Engine(
            self.forward,
            reuse,
            self._queue,
            self._events.extend,
            eos_ids=frozenset(),
            prefill_chunk=CHUNK,
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
        request = Request(
            id=f"r{next(self._numbers)}",
            tenant="t",
            conversation="c",
            prompt=list(prompt),
            max_tokens=tokens,
            sampling=SamplingParams(seed=0, temperature=0.0),
            deadline=float("inf"),
            boundaries=list(boundaries),
        )
        sequence = Sequence(request)
        outcome = Outcome(list(prompt))
        self.forward.written = outcome.logprobs
        self._queue.put(sequence)
        steps = 0
        while outcome.reason is None:
            sequence.cancelled = steps == cancel_after
            self.engine.step()
            steps += 1
            self._collect(outcome)
        assert sequence.lease is not None
        assert not sequence.lease.open
        outcome.matched, outcome.cached = sequence.lease.matched, sequence.lease.cached
        assert problems(self.cache) == []
        return outcome

    def cold(self, prompt: list[int], answer: list[int]) -> Outcome:
        """Run mlx-lm's own caches over the same prompt, without umbel.

        Args:
            prompt: the prompt, prefilled on the engine's grid.
            answer: what is fed after it, so that log-probabilities can be compared also
                beyond a first difference.
        """
        cache = make_prompt_cache(self.model)
        for start in range(0, len(prompt) - 1, CHUNK):
            end = min(start + CHUNK, len(prompt) - 1)
            self.model(mx.array([prompt[start:end]]), cache=cache)
            mx.eval([layer.state for layer in cache])
        outcome = Outcome(prompt)
        for token in [prompt[-1], *answer[:-1]]:
            logits = self.model(mx.array([[token]]), cache=cache)[0, -1]
            outcome.logprobs.append(_log_softmax(logits))
            outcome.tokens.append(int(outcome.logprobs[-1].argmax()))
        return outcome

    def difference(self, outcome: Outcome) -> float:
        """Compare with a cold run: tokens must agree; returns the largest |Δ log p|."""
        cold = self.cold(outcome.prompt, outcome.tokens)
        assert outcome.tokens == cold.tokens
        pairs = zip(outcome.logprobs, cold.logprobs, strict=True)
        return max(float(np.abs(a - b).max()) for a, b in pairs)

    def _collect(self, outcome: Outcome) -> None:
        for _, event in self._events:
            if isinstance(event, TokenEvent):
                outcome.tokens.append(event.token)
            elif isinstance(event, Finished):
                assert event.error is None, event.error
                outcome.reason = event.reason
        self._events.clear()


def words(count: int, seed: Any) -> list[int]:
    """Make up a piece of prompt."""
    rng = random.Random(str(seed))  # noqa: S311  (not a secret)
    return [rng.randrange(zoo.VOCAB_SIZE) for _ in range(count)]


def _log_softmax(logits: mx.array) -> LogProbs:
    return np.array(logits - mx.logsumexp(logits), np.float32)
