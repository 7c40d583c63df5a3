"""Calls that must be made, in the models' own forms: what a grammar allows is read, and valid."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from umbel.models.errors import GrammarError
from umbel.models.params import Grammar
from umbel.models.text.codec import TextCodec
from umbel.models.text.conversation import JSONSchema, Reasoning, Tool, ToolCalls
from umbel.models.text.formats import HARMONY, OutputFormat
from umbel.models.text.grammar.compiler import GrammarCompiler
from umbel.models.text.grammar.narrowing import pattern_without
from umbel.models.text.harmony import TOKENS
from umbel.models.text.output import OutputParser

from . import templates
from .outputs import events_of, format_of, parts_of
from .templates import model_with
from .walks import allows, follow, walk

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
    folder = tmp_path_factory.mktemp("forms")
    return model_with(folder, templates.HARMONY, TOKENS, special=True).text


@pytest.fixture(scope="module")
def compiler(codec: TextCodec) -> GrammarCompiler:
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
    seeds: int = 20,
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
            WORDS: "not allowed",
        },
    ),
]


@pytest.mark.parametrize(("kwargs", "texts"), HARMONY_CASES)
def test_harmony(
    codec: TextCodec, compiler: GrammarCompiler, kwargs: dict[str, Any], texts: dict[str, str]
) -> None:
    calls = ToolCalls(tools=TOOLS, form="harmony", starts=BARRED, **kwargs)
    grammar = compiler.compile(calls, reasoning=THOUGHTS, header=FINAL)
    assert {text: follow(codec, grammar, text) for text in texts} == texts


def test_content_has_its_header(codec: TextCodec, compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(JSONSchema({"const": 1}), reasoning=THOUGHTS, header=FINAL)
    texts = {FINAL + "1": "complete", THOUGHT + FINAL + "1": "complete", "1": "not allowed"}
    assert {text: follow(codec, grammar, text) for text in texts} == texts


def test_text_has_no_spelled_out_markers(codec: TextCodec, compiler: GrammarCompiler) -> None:
    calls = ToolCalls(tools=TOOLS, form="harmony", starts=BARRED, forced=True)
    matcher = compiler.compile(calls, reasoning=THOUGHTS).matcher()
    for token in codec.encode("<|channel|>analysis<|message|>", special_tokens=False):
        matcher.consume(token)
    *letters, last = (codec.encode(letter, special_tokens=False)[0] for letter in "<|end|>")
    for token in letters:
        matcher.consume(token)
    assert not allows(matcher.mask(), last)


@pytest.mark.parametrize("forced", [True, False])
def test_drawn_calls_in_harmony(
    codec: TextCodec, compiler: GrammarCompiler, *, forced: bool
) -> None:
    calls = ToolCalls(tools=TOOLS, form="harmony", starts=BARRED, forced=forced)
    grammar = compiler.compile(calls, reasoning=THOUGHTS)
    assert check_walks(codec, grammar, HARMONY, TOOLS, HARD, forced=forced) > 3


# -- forms with tags ---------------------------------------------------------------------------

WAYS = Tool(
    name="ways",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "list": {
                "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/x"}}, {"type": "null"}]
            },
            "short": {"type": "string", "minLength": 1, "maxLength": 8},
            "day": {"type": "string", "format": "date"},
            "third": {"type": "integer", "multipleOf": 3},
            "map": {"type": "object", "additionalProperties": {"type": "string"}},
            "any": {"type": "object"},
            "unit": {"enum": ["5", "kg"]},
            "free": {"description": "anything"},
        },
        "$defs": {"x": {"type": ["string", "number", "boolean"]}},
    },
)
NULLABLE = Tool(
    name="nullable",
    strict=True,
    parameters={
        "type": "object",
        "properties": {
            "a": {"type": ["string", "null"]},
            "b": {"type": ["integer", "null"], "minimum": -5},
        },
        "required": ["a"],
    },
)
NARROWED = {
    "qwen3_coder": (
        "<tool_call>\n<function=order>\n",
        ("\n</parameter>\n", "<parameter=count>\n", "</function>", "</parameter>"),
    ),
    "glm47": (
        "<tool_call>order\n<arg_key>dish",
        ("</arg_value>", "<arg_key>count</arg_key>", "</arg_key>"),
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="order">\n',
        ("</parameter>\n", '<parameter name="count">', "</invoke>"),
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.order:0",
        ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    ),
}
GENERIC_ORDER = '<tool_call>\n{"name": "order"'


def calls_of(name: str, tools: list[Tool], **kwargs: Any) -> ToolCalls:
    starts = sorted(format_of(name).barred)
    return ToolCalls(tools=tools, form=name, starts=starts, **({"forced": True} | kwargs))


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", NARROWED)
def test_drawn_calls(
    codec: TextCodec, compiler: GrammarCompiler, name: str, *, parallel: bool
) -> None:
    begin, hard = NARROWED[name]
    tools = [ORDER, PING, WAYS, NULLABLE]
    grammar = compiler.compile(calls_of(name, tools, parallel=parallel))
    assert follow(codec, grammar, begin) == "goes on"
    assert follow(codec, grammar, GENERIC_ORDER) == "not allowed"
    assert check_walks(codec, grammar, format_of(name), tools, hard) > 3


@pytest.mark.slow
@pytest.mark.parametrize("tool", [ORDER, WAYS, NULLABLE], ids=lambda tool: tool.name)
@pytest.mark.parametrize("name", [*NARROWED, "harmony"])
def test_many_drawn_calls(
    codec: TextCodec, compiler: GrammarCompiler, name: str, tool: Tool
) -> None:
    form = HARMONY if name == "harmony" else format_of(name)
    calls = ToolCalls(tools=[tool], form=name, starts=sorted(form.barred), forced=True)
    hard = HARD if name == "harmony" else NARROWED[name][1]
    assert check_walks(codec, compiler.compile(calls), form, [tool], hard, seeds=40) > 20


@pytest.mark.parametrize("name", NARROWED)
def test_text_with_calls_of_strict_tools(
    codec: TextCodec, compiler: GrammarCompiler, name: str
) -> None:
    begin, hard = NARROWED[name]
    grammar = compiler.compile(calls_of(name, [ORDER, PING], forced=False))
    assert follow(codec, grammar, f"So: {begin}") == "goes on"
    assert follow(codec, grammar, f"So: {GENERIC_ORDER}") == "not allowed"
    check_walks(codec, grammar, format_of(name), [ORDER, PING], hard, forced=False, seeds=10)
    loose = Tool(name="loose", parameters={"type": "object"})
    grammar = compiler.compile(calls_of(name, [ORDER, loose], forced=False))
    assert follow(codec, grammar, f"So: {GENERIC_ORDER}") == "goes on"
    assert follow(codec, grammar, f"So: {begin}") == "not allowed"


UNWRITABLE: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_coder", {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
    ("qwen3_coder", {"$ref": "#/$defs/n"}),
    ("qwen3_coder", {"type": ["boolean", "null"]}),
    ("qwen3_coder", {"type": "integer", "minimum": 2**54}),
    ("qwen3_coder", {"type": "string", "enum": ["null", "a"]}),
    ("qwen3_coder", {"type": "string", "pattern": "^a"}),
    ("qwen3_coder", {"type": "string", "minLength": 5000}),
    ("qwen3_coder", {"enum": [1, 2]}),
    ("qwen3_coder", {"type": "array", "items": {"enum": ["</parameter>"]}}),
    ("qwen3_coder", {"type": "object", "patternProperties": {"^a": {}}}),
    ("glm47", {"type": "string", "enum": [" a"]}),
    ("glm47", {"type": "string", "enum": ["a", "bb"], "minLength": 2}),
    ("glm47", {"type": "string", "enum": ["</arg_value>"]}),
    ("minimax_m2", {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
    ("minimax_m2", {"$ref": "#/$defs/n"}),
    ("kimi_k2", {"const": "<|tool_call_end|>"}),
]


@pytest.mark.parametrize(("name", "schema"), UNWRITABLE)
def test_unwritable_schemas_take_the_generic_form(
    codec: TextCodec, compiler: GrammarCompiler, name: str, schema: dict[str, Any]
) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"n": {"type": "integer"}}}
    tool = Tool(name="order", parameters={"type": "object", **parameters})
    grammar = compiler.compile(calls_of(name, [tool]))
    assert follow(codec, grammar, GENERIC_ORDER) == "goes on"
    assert follow(codec, grammar, NARROWED[name][0]) == "not allowed"


@pytest.mark.parametrize(("tool", "parameter"), [("a b", "x"), ("f", "a b"), ("f", "<x>")])
def test_names_that_cannot_stand_in_a_tag(
    codec: TextCodec, compiler: GrammarCompiler, tool: str, parameter: str
) -> None:
    named = Tool(name=tool, parameters={"type": "object", "properties": {parameter: {}}})
    grammar = compiler.compile(calls_of("qwen3_coder", [named]))
    assert follow(codec, grammar, f'<tool_call>\n{{"name": "{tool}"') == "goes on"


def test_references_that_lead_far_are_written_in_the_generic_form(
    codec: TextCodec, compiler: GrammarCompiler
) -> None:
    defs: dict[str, Any] = {
        f"a{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/a{i + 1}"}}}
        for i in range(300)
    }
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a0"}}}
    tool = Tool(
        name="order", parameters={**parameters, "$defs": {**defs, "a300": {"type": "integer"}}}
    )
    grammar = compiler.compile(calls_of("qwen3_coder", [tool]))
    assert follow(codec, grammar, GENERIC_ORDER) == "goes on"


def test_schemas_that_no_form_can_write_are_refused(compiler: GrammarCompiler) -> None:
    tool = Tool(name="f", parameters={"properties": {"a": {"not": {"enum": [1]}}}})
    with pytest.raises(GrammarError) as caught:
        compiler.compile(calls_of("qwen3_coder", [tool]))
    assert caught.value.place == "parameters.properties.a.not"


@given(st.data())
def test_a_pattern_of_texts_without_tags(data: st.DataObject) -> None:
    tags = ("</parameter>", "<parameter=", "</function>", "<|end|>")
    words = [*tags, "<", "</", "<p", "parameter", "=", ">", "|", "end", "a", "\n"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=6)))
    text = text[: data.draw(st.integers(0, len(text)))]
    matched = re.match(pattern_without(tags), text) is not None
    assert matched == (not any(tag in text for tag in tags))
