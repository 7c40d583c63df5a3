"""Answers that are held to grammars, in batches of every kind: each is valid against its own."""

import functools
import json
import re
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator

from umbel.models.params import SamplingParams
from umbel.models.text.conversation import Choice, Constraint, JSONObject, JSONSchema, Regex
from umbel.models.text.grammar.compiler import GrammarCompiler
from umbel.scheduler.errors import ComputationError
from umbel.scheduler.request import FinishReason

from ..shared import AS_GPU
from .memory_tools import (
    CHUNK,
    GREEDY,
    SEEDED,
    Ask,
    ServerFixture,
    Told,
    replaced,
    words,
    zoo_model,
)

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel
    from umbel.models.text.codec import TextCodec

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS: tuple[Constraint | None, ...] = (
    JSONSchema(PERSON),
    None,
    Regex(r"[a-z]{2,5}-\d{3}"),
    Choice(["yes", "no", "perhaps", "世界"]),
    JSONObject(),
    None,
)


@functools.cache
def compiler(codec: "TextCodec") -> GrammarCompiler:
    """One for each vocabulary."""
    return GrammarCompiler(codec)


def model(name: str, codec: "TextCodec", **more: Any) -> "LoadedModel":
    """Make a model of the zoo that writes as the tiny one; its output layer is wider than that."""
    return replaced(zoo_model(name, **more), text=codec)


def ask(codec: "TextCodec", constraint: Constraint | None, number: int, **more: Any) -> Ask:
    """Ask for an answer."""
    grammar = None if constraint is None else compiler(codec).compile(constraint)
    chosen: dict[str, Any] = {"tokens": 80, "sampling": GREEDY} | more
    return Ask(words(20 + 9 * number, f"prompt {number}", 384), grammar=grammar, **chosen)


def text(codec: "TextCodec", told: Told) -> str:
    """The text that a client reads."""
    detokenizer = codec.detokenizer()
    return "".join(map(detokenizer.push, told.tokens))


def is_valid(constraint: Constraint | None, answer: str) -> bool:
    """Return True if an answer obeys its constraint."""
    match constraint:
        case JSONSchema(schema=schema):
            return bool(Draft202012Validator(schema).is_valid(json.loads(answer)))
        case JSONObject():
            return isinstance(json.loads(answer), dict)
        case Regex(pattern=pattern):
            return re.fullmatch(pattern, answer) is not None
        case Choice(options=options):
            return answer in options
    return True


def check(
    server: ServerFixture,
    codec: "TextCodec",
    asks: Items[Ask],
    told: Items[Told],
    which: Items[Any],
) -> int:
    """Every answer that ended by itself is valid; says how many did."""
    assert [t.error for t in told] == [None] * len(told)
    for constraint, each, a in zip(which, told, asks, strict=True):
        if each.reason is FinishReason.STOP:
            assert is_valid(constraint, text(codec, each))
        else:
            assert each.reason is FinishReason.LENGTH
            assert len(each.tokens) == a.tokens
    server.check_rest()
    return sum(t.reason is FinishReason.STOP for t in told)


@pytest.mark.parametrize(
    ("name", "overlaps", "exact"),
    [
        ("llama", False, False),
        pytest.param("llama", False, True, marks=pytest.mark.slow),
        pytest.param("llama", True, False, marks=pytest.mark.slow),
        ("llama", True, True),
        # Every kind of state with either value of both: who masks a token knows no state.
        pytest.param("qwen3_next", False, False, marks=pytest.mark.slow),
        pytest.param("qwen3_next", True, True, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", False, True, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", True, False, marks=pytest.mark.slow),
    ],
)
def test_a_mixed_batch_equals_solo_runs(
    tiny: "LoadedModel", name: str, *, overlaps: bool, exact: bool
) -> None:
    """Rows with and without a grammar: each answer is the one it has alone, and valid."""
    codec = tiny.text
    loaded = model(name, codec, device=AS_GPU) if overlaps else model(name, codec)
    asks = [ask(codec, c, i, at=i) for i, c in enumerate(CONSTRAINTS)]
    server = ServerFixture(loaded, 1 << 28, exact=exact)
    told = server.serve(asks)
    assert check(server, codec, asks, told, CONSTRAINTS) >= 2
    alone = ServerFixture(loaded, 1 << 28, exact=exact)
    for a, together in zip(asks, told, strict=True):
        (solo,) = alone.serve([Ask(a.prompt, a.tokens, a.sampling, grammar=a.grammar)])
        assert solo.cached is not None
        assert solo.cached < 4  # by chance: they have no prefix in common
        assert solo.tokens == together.tokens
        assert solo.reason == together.reason


def test_seeds_and_samplers_stay_inside(tiny: "LoadedModel") -> None:
    """Hot, biased, penalised and filtered draws are valid, each the same at every run."""
    codec = tiny.text
    samplers: list[dict[str, Any]] = [
        {},
        {"top_p": 0.5},
        {"top_k": 3, "repetition_penalty": 1.4},
        {"min_p": 0.2, "logit_bias": {5: 100.0, 90: -100.0}},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "top_logprobs": 3},
    ]
    params = [SamplingParams(seed=i, temperature=1.5, **s) for i, s in enumerate(samplers)]
    which: list[Any] = [c for c in CONSTRAINTS if c is not None for _ in params]
    asks = [ask(codec, c, i, sampling=params[i % len(params)]) for i, c in enumerate(which)]
    server = ServerFixture(model("llama", codec), 1 << 28)
    first, second = server.serve(asks), server.serve(asks)
    assert check(server, codec, asks * 2, first + second, which * 2) >= len(asks)
    assert [t.tokens for t in first] == [t.tokens for t in second]


@pytest.mark.parametrize(
    ("overlaps", "exact"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
def test_preempted_answers_go_on_in_their_grammars(
    tiny: "LoadedModel", *, overlaps: bool, exact: bool
) -> None:
    """A preempted sequence keeps its place: no token is followed twice."""
    codec = tiny.text
    loaded = model("llama", codec)
    long = {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 20}
    which: list[Any] = [JSONSchema(long), Regex("[a-z]{40,50}"), Regex("(yes|no){30,99}")]
    asks = [ask(codec, c, i, sampling=SEEDED) for i, c in enumerate(which)]
    expected = [t.tokens for t in ServerFixture(loaded, 1 << 28, exact=exact).serve(asks)]
    server = ServerFixture(loaded, 1 << 26, exact=exact)
    server.assembly.runner.overlaps = overlaps
    names = [server.send(a) for a in asks]
    for count in (1, 4, 10):
        server.until(lambda n=count: all(len(server.live[name].output) >= n for name in names))  # type: ignore[misc]
        server.squeeze()
        server.allow(server.budget)
    server.until(lambda: server.idle)
    told = [server.told[name] for name in names]
    check(server, codec, asks, told, which)
    assert [t.tokens for t in told] == expected
    assert server.preemptions >= 3


def test_max_tokens_in_the_middle(tiny: "LoadedModel") -> None:
    """An answer that is cut ends with `length`; one that is complete with its last, `stop`."""
    codec = tiny.text
    server = ServerFixture(model("llama", codec), 1 << 28)
    whole = ask(codec, Choice(["abcdefgh"]), 1)
    (told,) = server.serve([whole])
    assert told.reason is FinishReason.STOP
    count = len(told.tokens)
    assert count > 1
    for tokens, reason in ((count, FinishReason.STOP), (count - 1, FinishReason.LENGTH)):
        (cut,) = server.serve([Ask(whole.prompt, tokens, grammar=whole.grammar)])
        assert cut.reason is reason
        assert cut.tokens == told.tokens[:tokens]


def test_a_conversation_restarts(tiny: "LoadedModel") -> None:
    """The next turn begins its grammar at the start, over the cached state of the last one."""
    codec = tiny.text
    server = ServerFixture(model("llama", codec), 1 << 28)
    first = ask(codec, JSONSchema(PERSON), 2 * CHUNK // 9, tag="c", sampling=SEEDED)
    (told,) = server.serve([first])
    again = [*first.prompt, *told.tokens, *words(9, "next", 384)]
    grammar = compiler(codec).compile(JSONSchema(PERSON))
    (next_turn,) = server.serve([Ask(again, 80, SEEDED, tag="c", grammar=grammar)])
    assert next_turn.cached
    assert next_turn.cached >= len(first.prompt)
    check(server, codec, [first, first], [told, next_turn], [JSONSchema(PERSON)] * 2)


class _Broken:
    """A matcher that breaks at its third token, when told to."""

    def __init__(self, real: Any, how: str) -> None:
        self._real = real
        self._how = how
        self._taken = 0

    @property
    def is_complete(self) -> bool:
        return bool(self._real.is_complete)

    def consume(self, token: int) -> None:
        self._taken += 1
        if self._taken == 3 and self._how == "consume":
            raise RuntimeError("planted")
        self._real.consume(token)

    def mask(self) -> Any:
        if self._taken == 3 and self._how == "mask":
            raise RuntimeError("planted")
        return self._real.mask()


class _BrokenGrammar:
    def __init__(self, real: Any, how: str) -> None:
        self._real = real
        self._how = how

    def matcher(self) -> Any:
        if self._how == "matcher":
            raise RuntimeError("planted")
        return _Broken(self._real.matcher(), self._how)


@pytest.mark.parametrize("overlaps", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["matcher", "consume", "mask"])
def test_a_fault_hits_one_request(tiny: "LoadedModel", how: str, *, overlaps: bool) -> None:
    """A matcher that breaks ends its own request, in words; its neighbours do not notice."""
    codec = tiny.text
    server = ServerFixture(model("llama", codec), 1 << 28)
    server.assembly.runner.overlaps = overlaps
    asks = [ask(codec, c, i) for i, c in enumerate(CONSTRAINTS)]
    expected = [t.tokens for t in server.serve(asks)]
    broken = ask(codec, JSONSchema(PERSON), 0)
    broken.grammar = _BrokenGrammar(broken.grammar, how)
    *told, cursed = server.serve([*asks, broken])
    assert [t.tokens for t in told] == expected
    check(server, codec, asks, told, CONSTRAINTS)
    assert cursed.reason is FinishReason.ERROR
    assert isinstance(cursed.error, ComputationError)
    assert "planted" in str(cursed.error)
    assert len(cursed.tokens) == {"matcher": 0, "consume": 3, "mask": 3}[how]
