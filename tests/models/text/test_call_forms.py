"""Calls that must be made, in the models' own forms: what a grammar allows is read, and valid."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from umbel.models.text.codec import TextCodec
from umbel.models.text.constraint import JSONSchema, Reasoning, ToolCalls
from umbel.models.text.conversation import Tool
from umbel.models.text.formats import HARMONY, OutputFormat
from umbel.models.text.grammar import Grammar, GrammarCompiler
from umbel.models.text.harmony import TOKENS
from umbel.models.text.output import OutputParser

from . import templates
from .outputs import events_of, parts_of
from .templates import model_with
from .walks import walk

ORDER = Tool(
    name="order",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "dish": {"type": "string"},
            "size": {"enum": ["small", "large"], "type": "string"},
            "count": {"type": "integer", "minimum": 1},
            "price": {"type": "number"},
            "spicy": {"type": "boolean"},
            "notes": {"type": "array", "items": {"type": "string"}},
            "to": {
                "type": "object",
                "properties": {"street": {"type": "string"}, "floor": {"type": "integer"}},
                "required": ["street"],
            },
        },
        "required": ["dish", "count"],
    },
)
PING = Tool(name="ping", strict=True, parameters={"type": "object", "properties": {}})
TOOLS = [ORDER, PING]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Load a model with small tokens, and harmony's markers among them."""
    folder = tmp_path_factory.mktemp("forms")
    return model_with(folder, templates.HARMONY, TOKENS, special=True).text


@pytest.fixture(scope="module")
def compiler(codec: TextCodec) -> GrammarCompiler:
    """One for all tests here."""
    return GrammarCompiler(codec)


def calls_in(form: OutputFormat, text: str, tools: list[Tool]) -> list[tuple[str, Any]]:
    """Read an answer's calls; nothing else is in it but thoughts and text."""
    parser = OutputParser(form, tools=tools, guaranteed=True)
    parts = parts_of(events_of(parser, [text]))
    return [(part[1], part[2]) for part in parts if part[0] == "call"]


def check_walks(
    codec: TextCodec,
    grammar: Grammar,
    form: OutputFormat,
    tools: list[Tool],
    hard: tuple[str, ...],
    *,
    forced: bool = True,
    seeds: int = 40,
) -> int:
    """Draw answers and read them: each call is one of a tool's, and valid; return how many."""
    validators = {tool.name: Draft202012Validator(tool.parameters) for tool in tools}
    read = 0
    for seed in range(seeds):
        text = walk(codec, grammar, seed, hard)
        if text is None:
            continue
        calls = calls_in(form, text, tools)
        assert calls or not forced, (seed, text)
        for name, arguments in calls:
            errors = [error.message for error in validators[name].iter_errors(arguments)]
            assert errors == [], (seed, text, arguments)
        read += len(calls)
    return read


# -- harmony -----------------------------------------------------------------------------------

THOUGHTS = Reasoning("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", opened=False)
BARRED = sorted(HARMONY.barred)
HARD = ("<|end|>", "<|call|>", "<|channel|>final<|message|>", "<|message|>", "to=functions.ping")


def follow(codec: TextCodec, grammar: Grammar, text: str) -> str:
    """Write a text token by token: `complete`, `may end`, `goes on`, or where it is not allowed."""
    matcher = grammar.matcher()
    for token in codec.encode(text, special_tokens=False):
        if not matcher.mask()[token // 32] >> token % 32 & 1:
            return "not allowed"
        matcher.consume(token)
    if matcher.is_complete:
        return "complete"
    mask = matcher.mask()
    ends = [bool(mask[eos // 32] >> eos % 32 & 1) for eos in codec.eos_ids]
    assert len(set(ends)) == 1
    return "may end" if ends[0] else "goes on"


ORDERED = '{"dish": "soup", "count": 2}'
IN_CHANNEL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
IN_ROLE = " to=functions.{}<|channel|>commentary json<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Hm\n\n<|end|><|start|>assistant"
WORDS = "<|channel|>commentary<|message|>I order.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
HARMONY_CASES: list[tuple[dict[str, Any], dict[str, str]]] = [
    (
        {"forced": True},
        {
            IN_CHANNEL.format("order") + ORDERED: "complete",
            IN_ROLE.format("order") + ORDERED: "complete",
            THOUGHT + IN_CHANNEL.format("ping") + "{}": "complete",
            THOUGHT + WORDS + IN_CHANNEL.format("ping") + "{}": "complete",
            IN_CHANNEL.format("order") + '{"dish": 1': "not allowed",
            IN_CHANNEL.format("pong"): "not allowed",
            FINAL: "not allowed",
            "Hello": "not allowed",
            WORDS: "goes on",
        },
    ),
    (
        {"forced": False},
        {
            IN_CHANNEL.format("order") + ORDERED: "complete",
            FINAL + "Hello": "may end",
            THOUGHT + WORDS + FINAL + "Hello": "may end",
            FINAL + "Hello <tool_call>": "not allowed",
            "Hello": "not allowed",
        },
    ),
    (
        {"forced": False, "content": JSONSchema({"const": 1})},
        {
            IN_CHANNEL.format("order") + ORDERED: "complete",
            THOUGHT + FINAL + "1": "complete",
            FINAL + "2": "not allowed",
        },
    ),
]


@pytest.mark.parametrize(("kwargs", "texts"), HARMONY_CASES)
def test_harmony(
    codec: TextCodec, compiler: GrammarCompiler, kwargs: dict[str, Any], texts: dict[str, str]
) -> None:
    """A call stands where the model writes it: behind its thoughts, in the header's two ways."""
    calls = ToolCalls(tools=TOOLS, form="harmony", starts=BARRED, **kwargs)
    grammar = compiler.compile(calls, reasoning=THOUGHTS, header=FINAL)
    assert {text: follow(codec, grammar, text) for text in texts} == texts


def test_content_has_its_header(codec: TextCodec, compiler: GrammarCompiler) -> None:
    """What a schema holds is a message of the channel `final`."""
    grammar = compiler.compile(JSONSchema({"const": 1}), reasoning=THOUGHTS, header=FINAL)
    texts = {FINAL + "1": "complete", THOUGHT + FINAL + "1": "complete", "1": "not allowed"}
    assert {text: follow(codec, grammar, text) for text in texts} == texts


def test_markers_that_are_written_out_are_no_text(
    codec: TextCodec, compiler: GrammarCompiler
) -> None:
    """A parser reads text: a marker in other tokens would be one as well."""
    calls = ToolCalls(tools=TOOLS, form="harmony", starts=BARRED, forced=True)
    matcher = compiler.compile(calls, reasoning=THOUGHTS).matcher()
    for token in codec.encode("<|channel|>analysis<|message|>", special_tokens=False):
        matcher.consume(token)
    *letters, last = (codec.encode(letter, special_tokens=False)[0] for letter in "<|end|>")
    for token in letters:
        matcher.consume(token)
    assert not matcher.mask()[last // 32] >> last % 32 & 1


@pytest.mark.parametrize("forced", [True, False])
def test_drawn_calls_in_harmony(
    codec: TextCodec, compiler: GrammarCompiler, *, forced: bool
) -> None:
    """Whatever the grammar allows is read, and its arguments are valid."""
    calls = ToolCalls(tools=TOOLS, form="harmony", starts=BARRED, forced=forced)
    grammar = compiler.compile(calls, reasoning=THOUGHTS)
    assert check_walks(codec, grammar, HARMONY, TOOLS, HARD, forced=forced) > 5
