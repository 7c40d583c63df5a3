"""A tiny real model and sequences that it runs together, held to mlx-lm's own caches."""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache

from umbel.models.device import DevicePolicy, device_policy
from umbel.models.forward import Forward
from umbel.models.layer_states import LayerStack, LiveStates
from umbel.models.rows import LIMIT, Rows
from umbel.models.spans import PackedSpan, WholeCheckpoint

from .. import zoo
from ..shared import measured_once, shared_model

T = TypeVar("T")

NAMES = (
    *("llama", "qwen3_next", "gemma3_text", "gpt_oss", "mamba2", "falcon_h1"),
    *("deepseek_v3", "kimi_linear", "longcat_flash", "gemma3n", "gemma4_text"),
    *("deepseek_v32", "gemma2", "plamo2", "mamba", "llama4"),
)
"""Models of each kind that runs in batches."""

_ONCE = zoo.MIXED | {"gemma3n", "gemma4_text", "deepseek_v32"}

TOLERANCE = 1e-3
"""Of logits, whose standard deviation is about 2."""


def each(values: Iterable[T], names: Iterable[str] = NAMES) -> list[tuple[str, T]]:
    """Pair these models with all values of a test's parameter, and twins with one; see `zoo`."""
    return zoo.each(values, names, _ONCE)


@dataclass
class Branch:
    """A place from which sequences start: tokens, and their stored state."""

    tokens: list[int] = field(default_factory=list)
    spans: list[PackedSpan] = field(default_factory=list)
    checkpoint: WholeCheckpoint | None = None


@dataclass
class Agent:
    """A running sequence, all its tokens, and the logits that it got, by position."""

    states: LiveStates
    tokens: list[int]
    logits: dict[int, mx.array] = field(default_factory=dict)


class Party:
    """A model, and the agents that it runs.

    Args:
        name: one of NAMES.
        seed: of all that is random.
        own: tokens of its trunk's end, at most, that a row copies; None as usual.
        device: as which device to run; this one, unless one is given.
        overrides: entries of the model's config to change.
    """

    def __init__(
        self,
        name: str,
        seed: int = 0,
        *,
        own: int | None = None,
        limit: int = LIMIT,
        device: DevicePolicy | None = None,
        **overrides: Any,
    ) -> None:
        self.model = shared_model(name, **overrides)
        self.stack = LayerStack(self.model)
        device = device or device_policy()
        text = SimpleNamespace(vocab_size=zoo.VOCAB_SIZE)
        loaded = SimpleNamespace(model=self.model, stack=self.stack, text=text, device=device)
        with measured_once(self.model):
            self.forward = Forward(cast("Any", loaded))
        assert self.forward.batches
        if own is not None:
            self.forward._rows = Rows(self.stack.open(), device, own=own, limit=limit)
        self.rng = random.Random(seed)  # noqa: S311  (not a secret)
        self.agents: list[Agent] = []

    @property
    def rows(self) -> Rows:
        """The batch."""
        assert self.forward._rows is not None
        return self.forward._rows

    def words(self, count: int) -> list[int]:
        """Make up tokens."""
        return [self.rng.randrange(zoo.VOCAB_SIZE) for _ in range(count)]

    def come(self, branch: Branch | None = None, prompt: int = 0) -> Agent:
        """Start an agent at a branch, with a prompt after it."""
        branch = branch or Branch()
        states = self.forward.open(len(branch.tokens), branch.spans, branch.checkpoint)
        words = self.words(prompt)
        if words:
            self.forward.prefill(words, states)
        self.agents.append(Agent(states, branch.tokens + words))
        return self.agents[-1]

    def store(self, agent: Agent) -> Branch:
        """Store all that an agent has, and have it start there anew."""
        checkpoint = agent.states.capture() if self.stack.has_checkpoints else None
        span = agent.states.seal()
        spans = [*agent.states.spans, *([] if span is None else [span])]
        agent.states.close()
        branch = Branch(list(agent.tokens), spans, checkpoint)
        agent.states = self.forward.open(len(branch.tokens), branch.spans, checkpoint)
        return branch

    def branch(self, length: int, after: Branch | None = None) -> Branch:
        """Compute and store a prompt that nobody goes on with."""
        agent = self.come(after, length)
        self.agents.remove(agent)
        return self.store(agent)

    def feed(self, agents: list[Agent] | None = None, steps: int = 1) -> None:
        """Give agents tokens, all unless some are named, in another order each time."""
        chosen = list(self.agents if agents is None else agents)
        for _ in range(steps):
            self.rng.shuffle(chosen)
            tokens = self.words(len(chosen))
            logits = self.forward.logits(mx.array(tokens), [agent.states for agent in chosen])
            for number, agent in enumerate(chosen):
                agent.logits[len(agent.tokens)] = logits[number]
                agent.tokens.append(tokens[number])

    def leave(self, agent: Agent) -> None:
        """Hold an agent's logits to mlx-lm's, and end it."""
        self.check(agent)
        agent.states.close()
        self.agents.remove(agent)

    def check(self, *agents: Agent) -> None:
        """Hold agents' logits to those of the same tokens run alone by mlx-lm."""
        for agent in agents or self.agents:
            assert agent.states.offset == len(agent.tokens)
            if not agent.logits:
                continue
            with mlx_lm_alone(self.model):
                cache = make_prompt_cache(self.model)
                expected = self.model(mx.array([agent.tokens]), cache=cache)[0]
                mx.eval(expected)
            got = mx.stack(list(agent.logits.values()))
            difference = mx.abs(got - expected[mx.array(list(agent.logits))]).max()
            assert difference < TOLERANCE, difference  # and no NaN

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
            if any(leased is span for leased in agent.states.spans):
                agent.states.set_trunk(replaced(agent.states.spans, span, parts))


def replaced(
    spans: list[PackedSpan], old: PackedSpan, new: tuple[PackedSpan, PackedSpan]
) -> list[PackedSpan]:
    """Put two spans in the place of one."""
    return [part for span in spans for part in (new if span is old else (span,))]


@contextmanager
def mlx_lm_alone(model: Any) -> Iterator[None]:
    """Run a model with mlx-lm's own attention."""
    name = "scaled_dot_product_attention"
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    with pytest.MonkeyPatch.context() as patch:
        for each in modules:
            if hasattr(each, name):
                patch.setattr(each, name, getattr(base, name))
        yield
