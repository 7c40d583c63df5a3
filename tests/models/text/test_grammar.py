"""Grammars: which tokens may follow, with the embedded model's own vocabulary."""

import ctypes
import gc
import json
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
from tokenizers import Tokenizer

from umbel.models.errors import GrammarError, MatcherError
from umbel.models.text.conversation import (
    Choice,
    Constraint,
    JSONObject,
    JSONSchema,
    Reasoning,
    Regex,
    Tool,
    ToolCalls,
)
from umbel.models.text.grammar import compiler as module
from umbel.models.text.grammar.calls import call_form
from umbel.models.text.grammar.compiler import GrammarCompiler

from .walks import allows, follow

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel
    from umbel.models.text.codec import TextCodec

THINK = Reasoning("<think>", "</think>", opened=False)
THINKING = Reasoning("<think>", "</think>", opened=True)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
STRICT = Tool(name="weather", parameters=CITY, strict=True)
FREE = Tool(
    name="note",
    parameters={"type": "object", "properties": {"x": {"not": {"type": "null"}}}},
    place="tools.1.parameters",
)
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOTE = '<tool_call>\n{"name": "note", "arguments": {"a": [1]}}\n</tool_call>'


@pytest.fixture(scope="module")
def codec(smollm2: "LoadedModel") -> "TextCodec":
    return smollm2.text


@pytest.fixture(scope="module")
def compiler(codec: "TextCodec") -> GrammarCompiler:
    return GrammarCompiler(codec)


CASES: list[tuple[Constraint | ToolCalls, Reasoning | None, dict[str, str]]] = [
    (
        JSONObject(),
        None,
        {
            '{"a": [1, null]}': "complete",
            '{\n  "a": 1\n}': "complete",
            '{"a"': "goes on",
            "[1]": "not allowed",
            " {}": "not allowed",
            '{\n\n\n\n"a': "not allowed",
            '{  "a"': "not allowed",
            '{"a": \n1': "not allowed",
            '{"a":\n\n' + " " * 20 + "1": "goes on",
            '{"a":\n\n' + " " * 21: "not allowed",
        },
    ),
    (
        JSONSchema(CITY),
        None,
        {
            '{"city": "Rome"}': "complete",
            '{"city": "a\\nb\\"c"}': "complete",
            '{"city": 1': "not allowed",
            '{"c\\u0069ty"': "not allowed",
            '{"town"': "not allowed",
        },
    ),
    (JSONSchema(True), None, {"12": "may end", '"x"': "complete", "null": "complete"}),
    (Regex("^(ab|c)+d?$"), None, {"abc": "may end", "abd": "complete", "b": "not allowed"}),
    (Regex("a/b\n\\."), None, {"a/b\n.": "complete"}),
    (Regex("^a|b$"), None, {"a": "complete", "b": "complete"}),
    (Regex(r"cost \$"), None, {"cost $": "complete", "cost \\": "not allowed"}),
    (
        Choice(["yes", 'a "b"\n\\', "世界"]),
        None,
        {"yes": "complete", 'a "b"\n\\': "complete", "世界": "complete", "no": "not allowed"},
    ),
    (
        JSONObject(),
        THINK,
        {
            "{}": "complete",
            "<think>\nSo {x\n</think>\n\n{}": "complete",
            "<think>{}": "goes on",
            "hm": "not allowed",
        },
    ),
    (
        Choice(["yes"]),
        THINKING,
        {"hm\n</think>\n\nyes": "complete", "yes": "goes on", "</think>no": "not allowed"},
    ),
    (
        ToolCalls(tools=[STRICT], form="generic", forced=True),
        None,
        {
            WEATHER: "may end",
            f"{WEATHER}\n{WEATHER}": "may end",
            "\n".join([WEATHER] * 16): "complete",
            "Hello": "not allowed",
            NOTE: "not allowed",
            '<tool_call>\n{"name": "weather", "arguments": {}': "not allowed",
        },
    ),
    (
        ToolCalls(tools=[STRICT], form="json_tools", forced=True, parallel=False),
        THINK,
        {WEATHER: "complete", f"<think>{NOTE}</think>\n{WEATHER}": "complete"},
    ),
    (
        ToolCalls(tools=[STRICT, FREE], form="generic", forced=False),
        None,
        {
            "Hello": "may end",
            f"So: {NOTE}\n{WEATHER} there": "may end",
            "<tool_call>x": "not allowed",
            "<tool_ca": "may end",
            "<tool_call>\n": "goes on",
            '<tool_call>\n{"name": "weather", "arguments": {"town': "not allowed",
        },
    ),
    (
        ToolCalls(tools=[STRICT, FREE], form="generic", forced=False, parallel=False),
        THINKING,
        {
            f"{NOTE}</think>Hello": "may end",
            f"</think>So: {NOTE}": "complete",
            "</think>Hello <tool_call>x": "not allowed",
        },
    ),
    (
        ToolCalls(tools=[STRICT, FREE], form="mistral", forced=False, parallel=False),
        None,
        {
            '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "x"}}]': "complete",
            "[TOOL_CALLS] [": "not allowed",
        },
    ),
]


@pytest.mark.parametrize(("constraint", "reasoning", "texts"), CASES)
def test_constraint_allows_text_in_any_tokens(
    codec: "TextCodec",
    compiler: GrammarCompiler,
    constraint: Constraint | ToolCalls,
    reasoning: Reasoning | None,
    texts: dict[str, str],
) -> None:
    grammar = compiler.compile(constraint, reasoning=reasoning)
    assert {text: follow(codec, grammar, text) for text in texts} == texts


def test_markers_that_are_special_tokens(codec: "TextCodec", compiler: GrammarCompiler) -> None:
    marked = Reasoning("<|im_start|>", "<|endoftext|>", opened=False)
    grammar = compiler.compile(Choice(["yes"]), reasoning=marked)
    assert follow(codec, grammar, "<|im_start|>hm</think><|endoftext|>yes") == "complete"
    matcher = grammar.matcher()
    matcher.consume(codec.special_tokens_by_name["<|im_start|>"])
    for token in codec.encode("<|") + codec.encode("endoftext|>"):
        matcher.consume(token)
    assert not matcher.is_complete
    yes = codec.encode("yes")[0]
    matcher.consume(yes)
    assert allows(matcher.mask(), yes), "still inside the thinking"


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (Choice(["a <|im_end|> b", "no"]), "a <|im_end|> b"),
        (Regex(r"a <\|im_end\|> b"), "a <|im_end|> b"),
        (JSONSchema({"const": "<|im_end|>"}), '"<|im_end|>"'),
    ],
)
def test_names_of_special_tokens_can_be_written_out(
    codec: "TextCodec", compiler: GrammarCompiler, constraint: Constraint, text: str
) -> None:
    """In the tokens of that text: the special one writes nothing."""
    plain = Tokenizer.from_str(codec.to_json())
    plain.encode_special_tokens = True
    matcher = compiler.compile(constraint).matcher()
    for token in plain.encode(text, add_special_tokens=False).ids:
        assert allows(matcher.mask(), token)
        matcher.consume(token)
    assert matcher.is_complete


def test_special_tokens_stay_out_of_text(codec: "TextCodec", compiler: GrammarCompiler) -> None:
    special = set(codec.special_tokens_by_name.values())
    for constraint, reasoning in (
        (Regex("(?s:.*)"), None),
        (JSONObject(), THINKING),
        (ToolCalls(tools=[STRICT], form="generic", forced=False), None),
    ):
        mask = compiler.compile(constraint, reasoning=reasoning).matcher().mask()
        assert {token for token in special if allows(mask, token)} <= codec.eos_ids


def test_every_end_is_allowed_and_no_token_beyond_the_vocabulary(tiny: "LoadedModel") -> None:
    tiny.text.eos_ids, before = frozenset({0, 1, 2}), tiny.text.eos_ids
    try:
        grammar = GrammarCompiler(tiny.text).compile(Regex("a*"))
    finally:
        tiny.text.eos_ids = before
    mask = grammar.matcher().mask()
    assert mask.dtype == np.uint32
    assert len(mask) == -(-tiny.text.vocab_size // 32)
    assert all(allows(mask, token) for token in (0, 1, 2))
    assert not any(np.unpackbits(mask.view(np.uint8), bitorder="little")[tiny.text.vocab_size :])


@pytest.mark.parametrize("forced", [False, True])
def test_only_a_call_that_is_held_to_its_schema_can_be_read(
    codec: "TextCodec", compiler: GrammarCompiler, *, forced: bool
) -> None:
    """The parser finds calls in thoughts too, and those of the model's own form in any text."""
    calls = ToolCalls(
        tools=[STRICT], form="generic", forced=forced, starts=["<own_call>", "<tool_call>"]
    )
    grammar = compiler.compile(calls, reasoning=THINKING)
    end = "may end"
    assert follow(codec, grammar, f"a <tool_c or <own\n</think>\n\n{WEATHER}") == end
    for thought in (NOTE, WEATHER, "<own_call>", "hm <tool_call>"):
        assert follow(codec, grammar, f"{thought}</think>{WEATHER}") == "not allowed"
    for text in ("x <own_call>", f"{WEATHER}\n<own_call>"):
        assert follow(codec, grammar, f"</think>{text}") == "not allowed"


def test_content_does_not_begin_like_a_call(codec: "TextCodec", compiler: GrammarCompiler) -> None:
    anything = Regex("(?s:.*)")
    calls = ToolCalls(tools=[STRICT], form="generic", forced=False, content=anything)
    markers = ["<own_call>", "<tool_call>"]
    told = {
        f"So: {NOTE}": "may end",
        "<tool_call": "may end",
        WEATHER: "may end",
        NOTE: "not allowed",
        f" \n{WEATHER}": "not allowed",
        "<own_call>": "not allowed",
    }
    grammar = compiler.compile(calls, markers=markers)
    assert {text: follow(codec, grammar, text) for text in told} == told
    alone = compiler.compile(anything, markers=["<think>"])
    assert follow(codec, alone, "<think>") == "not allowed"
    assert follow(codec, compiler.compile(anything), "<think>") == "may end"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (Choice(["yes", "\n<tool_call>x"]), "the option '\\n<tool_call>x' begins with a marker"),
        (Regex("<tool_call>.*|<think>"), "matches nothing that does not begin like a call"),
    ],
)
def test_content_that_could_only_be_a_call_is_refused(
    compiler: GrammarCompiler, content: Constraint, words: str
) -> None:
    calls = ToolCalls(tools=[STRICT], form="generic", forced=False, content=content)
    for wanted in (content, calls):
        with pytest.raises(GrammarError) as caught:
            compiler.compile(wanted, markers=["<think>", "<tool_call>"])
        assert words in str(caught.value)


def test_matchers_of_one_grammar_are_independent(
    codec: "TextCodec", compiler: GrammarCompiler
) -> None:
    grammar = compiler.compile(Choice(["one", "two"]))
    one, two = grammar.matcher(), grammar.matcher()
    one.consume(codec.encode("one")[0])
    assert one.is_complete
    two.consume(codec.encode("two")[0])
    assert two.is_complete


def test_a_token_that_is_not_allowed_is_an_error(
    codec: "TextCodec", compiler: GrammarCompiler
) -> None:
    matcher = compiler.compile(Choice(["yes"])).matcher()
    with pytest.raises(MatcherError, match="doesn't satisfy the grammar"):
        matcher.consume(codec.encode("no")[0])
    with pytest.raises(MatcherError):
        matcher.mask()


def test_known_constraints_are_not_compiled_again(
    codec: "TextCodec", monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(codec)
    first = compiler.compile(JSONSchema(CITY))
    assert compiler.compile(JSONSchema(json.loads(json.dumps(CITY)))) is first
    assert compiler.compile(JSONSchema(CITY), reasoning=THINK) is not first
    ordered = compiler.compile(JSONSchema({"properties": {"a": {}, "b": {}}}))
    assert compiler.compile(JSONSchema({"properties": {"b": {}, "a": {}}})) is not ordered
    monkeypatch.setattr(module, "_KEPT", 2)
    compiler.compile(Choice(["x"]))
    assert len(compiler._kept) == 2
    assert compiler.compile(JSONSchema(CITY)) is not first
    monkeypatch.setattr(module, "_KEPT_BYTES", first.nbytes + 1)
    compiler.compile(Choice(["y"]))
    assert sum(grammar.nbytes for grammar in compiler._kept.values()) == compiler._kept_bytes
    assert compiler._kept_bytes <= first.nbytes + 1


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Regex(""), "the pattern is empty"),
        (Regex("(?=a)b"), "look-around is not supported"),
        (Regex(r"(a)\1"), "back-references are not supported"),
        (Regex("a("), "unclosed group"),
        (Regex("a\\"), "backslash"),
        (Regex("(((.{1,50}x?){1,50}y?){1,50}z?){1,50}"), "too complex"),
        (Regex("a" * 200_000), "more than 100000 characters"),
        (Choice([]), "needs options"),
        (Choice(["a", ""]), "cannot be empty"),
        (Choice(["a" * 200_000]), "at most"),
        (JSONSchema(False), "allows nothing"),
        (JSONSchema({"anyOf": [{"$ref": "#"}]}), "no answer can match"),
        (JSONSchema({"$ref": "#"}), "refers to itself"),
        (ToolCalls(tools=[], form="generic", forced=True), "no tool"),
        (ToolCalls(tools=[STRICT], form="gemma4", forced=True), "no grammar for calls"),
        (ToolCalls(tools=[STRICT, FREE], form="generic", forced=True), "tools.1.parameters"),
        (
            ToolCalls(
                tools=[Tool(name="f", parameters={"type": "string"}, place="tools.7.input_schema")],
                form="generic",
                forced=True,
            ),
            "tools.7.input_schema.type: must allow an object",
        ),
    ],
)
def test_unsupported_constraints_are_refused_in_words(
    compiler: GrammarCompiler, constraint: Constraint | ToolCalls, words: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(constraint)
    assert words in str(caught.value)
    assert "%json" not in str(caught.value)
    assert len(str(caught.value)) < 400


class _Heap(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    ]


def heap() -> int:
    gc.collect()
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Heap
    told = ask()
    return int(told.uordblks + told.hblkhd)


def wide(count: int, kind: dict[str, Any], *, required: bool = False) -> dict[str, Any]:
    named = {f"property{i}": kind for i in range(count)}
    needed = list(named) if required else []
    return {"properties": named, "required": needed, "additionalProperties": False}


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc's heap")
@pytest.mark.parametrize(
    "schema",
    [
        wide(1000, {"type": "integer"}),
        wide(60, wide(30, {"type": "string"})),
        wide(150, {"type": "array", "items": {"type": "number"}, "maxItems": 50}, required=True),
        wide(20, {"type": "string", "maxLength": 2000}, required=True),
    ],
)
def test_a_grammar_takes_no_more_than_is_estimated(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    chosen = np.random.default_rng(1)
    wanted = JSONSchema({"type": "object", **schema})
    compiler.compile(JSONObject())  # what all grammars have in common is there
    before = heap()
    grammar = compiler._compile(wanted, module._Around(None, "", ()))
    for _ in range(3):
        matcher = grammar.matcher()
        for _ in range(100):
            if matcher.is_complete:
                break
            bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
            matcher.consume(int(chosen.choice(np.flatnonzero(bits))))
    del matcher
    assert heap() - before < grammar.nbytes


def test_grammar_larger_than_the_cache_evicts_no_other(
    codec: "TextCodec", monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(codec)
    small = compiler.compile(JSONSchema(CITY))
    monkeypatch.setattr(module, "_KEPT_BYTES", small.nbytes + 1)
    large = compiler.compile(JSONSchema({"type": "string", "maxLength": 3000}))
    assert large.nbytes > small.nbytes + 1
    assert follow(codec, large, '"x"') == "complete"
    assert compiler.compile(JSONSchema(CITY)) is small
    assert compiler._kept_bytes == small.nbytes


def test_schemas_of_tools_that_are_not_strict_do_not_matter(compiler: GrammarCompiler) -> None:
    compiler.compile(ToolCalls(tools=[FREE], form="generic", forced=False))
    with pytest.raises(GrammarError) as caught:
        compiler.compile(ToolCalls(tools=[FREE], form="generic", forced=True))
    assert caught.value.place == "tools.1.parameters.properties.x.not"


def test_forms() -> None:
    assert call_form(None) == "generic"
    assert call_form("json_tools") == "json_tools"
    assert call_form("glm47") == "glm47"
    assert call_form("gemma4") == "generic"
