"""A tiny real model and sequences that it runs together, held to mlx-lm's own caches."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
from mlx_lm.models.cache import make_prompt_cache

from umbel.models.backends import choose
from umbel.models.backends.base import Backend
from umbel.models.backends.prepare import prepare, restore
from umbel.models.batch_planner import leave
from umbel.models.kv.batch_cache import BatchCache
from umbel.models.kv.checkpoints import PackedCheckpoint
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.placement import Placement
from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.kv.spans import PackedSpan
from umbel.models.runner import ModelRunner

from .. import zoo
from ..placement_check import problems
from ..shared import measured_once, shared_model
from .steps import run

T = TypeVar("T")

NAMES = (
    *("llama", "qwen3_next", "gemma3_text", "gpt_oss", "mamba2", "falcon_h1"),
    *("deepseek_v3", "kimi_linear", "longcat_flash", "gemma3n", "gemma4_text"),
    *("deepseek_v32", "gemma2", "plamo2", "mamba", "llama4", "llama_kv8"),
)
"""Models of each kind that runs in batches."""

CLASSES = ("llama", "falcon_h1", "deepseek_v3", "gemma4_text", "llama_kv8")
"""Models of each kind whose rows have length classes."""

TOLERANCE = 1e-3
"""Of logits, whose standard deviation is about 2."""


def each(values: Iterable[T], names: Iterable[str] = NAMES) -> list[tuple[str, T]]:
    """Pair these models with all values of a test's parameter, and twins with one; see `zoo`."""
    return zoo.each(values, names)


@dataclass
class Branch:
    """A place from which sequences start: tokens, and their stored state."""

    tokens: list[int] = field(default_factory=list)
    spans: list[PackedSpan] = field(default_factory=list)
    checkpoint: PackedCheckpoint | None = None


@dataclass
class Agent:
    """A running sequence, all its tokens, and the logits that it got, by position."""

    cache: SequenceCache
    tokens: list[int]
    logits: dict[int, mx.array] = field(default_factory=dict)


class BatchFixture:
    """A model, and the agents that it runs.

    Args:
        name: one of NAMES.
        seed: of all that is random.
        least_class: own tokens of a row in the first length class; None as usual.
        device: as which device to run; this one, unless one is given.
        overrides: entries of the model's config to change.
    """

    def __init__(
        self,
        name: str,
        seed: int = 0,
        *,
        least_class: int | None = None,
        device: Backend | None = None,
        **overrides: Any,
    ) -> None:
        self._quantized = name in zoo.QUANTIZED
        self.model = shared_model(name, **overrides)
        self.layout = CacheLayout(self.model)
        device = device or choose()
        text = SimpleNamespace(vocab_size=zoo.VOCAB_SIZE)
        loaded = SimpleNamespace(model=self.model, layout=self.layout, text=text, backend=device)
        with measured_once(self.model):
            self.runner = ModelRunner(cast("Any", loaded))
        assert self.runner.batches
        if least_class is not None:
            self.runner.use(replace(self.runner.rules, least_class=least_class))
        self.rng = random.Random(seed)  # noqa: S311  (not a secret)
        self.agents: list[Agent] = []

    @property
    def placement(self) -> Placement:
        """Where everybody's state lies."""
        return self.runner.placement

    @property
    def batch(self) -> BatchCache:
        """The batch's buffers."""
        assert self.placement.batch is not None
        return self.placement.batch

    def words(self, count: int) -> list[int]:
        """Make up tokens."""
        return [self.rng.randrange(zoo.VOCAB_SIZE) for _ in range(count)]

    def come(self, branch: Branch | None = None, prompt: int = 0) -> Agent:
        """Start an agent at a branch, with a prompt after it."""
        branch = branch or Branch()
        cache = self.runner.open(len(branch.tokens), branch.spans, branch.checkpoint)
        words = self.words(prompt)
        if words:
            self.runner.prefill(words, cache)
        self.agents.append(Agent(cache, branch.tokens + words))
        return self.agents[-1]

    def store(self, agent: Agent) -> Branch:
        """Store all that an agent has, and restart it from there."""
        checkpoint = self.captured(agent)
        span = self.placement.suffix_span(agent.cache)
        spans = [*agent.cache.leased, *([] if span is None else [span])]
        self.placement.close(agent.cache)
        branch = Branch(list(agent.tokens), spans, checkpoint)
        agent.cache = self.runner.open(len(branch.tokens), branch.spans, checkpoint)
        return branch

    def captured(self, agent: Agent) -> PackedCheckpoint | None:
        """Copy what is non-trimmable of an agent, if the model has such."""
        return self.placement.capture(agent.cache) if self.layout.has_checkpoints else None

    def leave_batch(self, agent: Agent) -> None:
        """Give an agent caches of its own, if it has a slot."""
        if agent.cache.slot is not None:
            move = leave(agent.cache, agent.cache.slot)
            self.placement.apply([move], {agent.cache.number: agent.cache})

    def publish(self, agent: Agent) -> None:
        """Store what an agent has of its own, and have it lease that."""
        span = self.placement.suffix_span(agent.cache)
        if span is not None:
            self.placement.lease(agent.cache, [*agent.cache.leased, span])

    def branch(self, length: int, after: Branch | None = None) -> Branch:
        """Compute and store a prompt without a sequence."""
        agent = self.come(after, length)
        self.agents.remove(agent)
        return self.store(agent)

    def decode(self, agents: list[Agent] | None = None, steps: int = 1) -> None:
        """Give agents tokens, all unless some are named, in another order each time."""
        chosen = list(self.agents if agents is None else agents)
        for _ in range(steps):
            self.rng.shuffle(chosen)
            tokens = self.words(len(chosen))
            output = run(self.runner, [agent.cache for agent in chosen], tokens)
            logits = output.logits
            assert logits is not None
            assert problems(self.placement, [agent.cache for agent in self.agents]) == []
            for number, agent in enumerate(chosen):
                agent.logits[len(agent.tokens)] = logits[number]
                agent.tokens.append(tokens[number])

    def leave(self, agent: Agent) -> None:
        """Hold an agent's logits to mlx-lm's, and end it."""
        self.check(agent)
        self.placement.close(agent.cache)
        self.agents.remove(agent)

    def check(self, *agents: Agent) -> None:
        """Hold agents' logits to those of the same tokens run alone by mlx-lm."""
        for agent in agents or self.agents:
            assert agent.cache.offset == len(agent.tokens)
            if not agent.logits:
                continue
            with mlx_lm_alone(self.model):
                cache = make_prompt_cache(self.model)
                expected = self.model(mx.array([agent.tokens]), cache=cache)[0]
                mx.eval(expected)
            got = mx.stack(list(agent.logits.values()))
            differences = mx.abs(got - expected[mx.array(list(agent.logits))])
            if self._quantized:
                assert differences.mean() < zoo.ROUNDED, differences.mean()
            else:
                assert differences.max() < TOLERANCE, differences.max()  # and no NaN

    def cut(self, branches: list[Branch]) -> None:
        """Cut a stored span in two, under all who lease it."""
        spans = {id(s): s for b in branches for s in b.spans if s.length > 1}
        if not spans:
            return
        span = self.rng.choice(list(spans.values()))
        parts = span.split(self.rng.randrange(1, span.length))
        for branch in branches:
            branch.spans = replaced(branch.spans, span, parts)
        for agent in self.agents:
            if any(leased is span for leased in agent.cache.leased):
                self.placement.lease(agent.cache, replaced(agent.cache.leased, span, parts))


def replaced(
    spans: list[PackedSpan], old: PackedSpan, new: tuple[PackedSpan, PackedSpan]
) -> list[PackedSpan]:
    """Put two spans in the place of one."""
    return [part for span in spans for part in (new if span is old else (span,))]


@contextmanager
def mlx_lm_alone(model: Any) -> Iterator[None]:
    """Run a model with mlx-lm's and MLX's own functions."""
    device = vars(model).get("_prepared_for")
    restore(model)
    try:
        yield
    finally:
        if device is not None:
            prepare(model, device)
