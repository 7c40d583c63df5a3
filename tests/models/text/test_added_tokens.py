"""Grammars of a model whose markers are added tokens and not special ones.

So are those of Qwen3, Qwen3-Coder, GLM, MiniMax and SmolLM3; and Gemma's line breaks.
"""

import pytest

from umbel.models.params import Grammar
from umbel.models.text.codec import TextCodec
from umbel.models.text.conversation import JSONObject, JSONSchema, Reasoning, Tool, ToolCalls
from umbel.models.text.formats import HARMONY
from umbel.models.text.grammar.compiler import GrammarCompiler
from umbel.models.text.harmony import TOKENS
from umbel.models.text.output import OutputParser

from .outputs import events_of, format_of, parts_of
from .templates import THINKING, model_with
from .walks import allows

ADDED = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<minimax:tool_call>", "</minimax:tool_call>", "[TOOL_CALLS]"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>", *TOKENS),
    *("\n", "\n\n", "  ", "<table>"),
)
ORDER = Tool(
    name="order",
    strict=True,
    parameters={
        "type": "object",
        "properties": {"dish": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["dish", "count"],
        "additionalProperties": False,
    },
)
ORDERED = '{"dish": "<table>  soup", "count": 2}'
IN_JSON = f'<tool_call>\n{{"name": "order", "arguments": {ORDERED}}}\n</tool_call>'
CALLS = {
    "generic": IN_JSON,
    "json_tools": IN_JSON,
    "mistral": f'[TOOL_CALLS][{{"name": "order", "arguments": {ORDERED}}}]',
    "harmony": f"<|channel|>commentary to=functions.order <|constrain|>json<|message|>{ORDERED}",
    "qwen3_coder": "<tool_call>\n<function=order>\n<parameter=dish>\n<table>  soup\n</parameter>\n"
    "<parameter=count>\n2\n</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>order\n<arg_key>dish</arg_key>\n<arg_value><table>  soup</arg_value>\n"
    "<arg_key>count</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="order">\n<parameter name="dish"><table>  soup'
    '</parameter>\n<parameter name="count">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.order:0"
    f"<|tool_call_argument_begin|>{ORDERED}<|tool_call_end|><|tool_calls_section_end|>",
}
THINK = Reasoning("<think>", "</think>", opened=False)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return model_with(tmp_path_factory.mktemp("added"), THINKING, ADDED).text


@pytest.fixture(scope="module")
def compiler(codec: TextCodec) -> GrammarCompiler:
    return GrammarCompiler(codec)


def follow(codec: TextCodec, grammar: Grammar, text: str) -> str:
    """Write a text as the model was trained to: `complete`, `may end`, `goes on`, or the rest."""
    matcher, tokens = grammar.matcher(), codec.encode(text, special_tokens=False)
    for index, token in enumerate(tokens):
        if not allows(matcher.mask(), token):
            return "".join(codec.read_token(t, first=False).text for t in tokens[index:])
        matcher.consume(token)
    if matcher.is_complete:
        return "complete"
    mask = matcher.mask()
    return "may end" if any(allows(mask, t) for t in codec.eos_ids) else "goes on"


def test_markers_are_single_tokens(codec: TextCodec) -> None:
    assert all(len(codec.encode(text, special_tokens=False)) == 1 for text in ADDED)
    assert not codec.special_tokens_by_name.keys() & set(ADDED)


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("thought", ["", "<think>\nHm.\n\n</think>\n\n"])
def test_calls(codec: TextCodec, compiler: GrammarCompiler, form: str, thought: str) -> None:
    own = HARMONY if form == "harmony" else format_of("json_tools" if form == "generic" else form)
    starts, text = sorted(own.barred), CALLS[form]
    for forced in (True, False):
        calls = ToolCalls(tools=[ORDER], form=form, forced=forced, starts=starts, parallel=False)
        grammar = compiler.compile(calls, reasoning=THINK)
        assert follow(codec, grammar, thought + text) == "complete"
        wrong = follow(codec, grammar, thought + text.replace("2", "x"))
        assert wrong.startswith("x")
    parts = parts_of(events_of(OutputParser(own, tools=[ORDER]), [text]))
    assert parts == [("call", "order", {"dish": "<table>  soup", "count": 2})]


def test_content_after_thoughts(codec: TextCodec, compiler: GrammarCompiler) -> None:
    opened = Reasoning("<think>", "</think>", opened=True)
    grammar = compiler.compile(JSONSchema(ORDER.parameters), reasoning=opened)
    assert follow(codec, grammar, f"Hm <table>\n\n</think>\n\n{ORDERED}") == "complete"
    assert follow(codec, grammar, f"{ORDERED}</think>[]") == "[]"
    free = compiler.compile(JSONObject(), reasoning=THINK)
    assert follow(codec, free, '<think>x</think>{\n  "a": [\n    "</think>"\n  ]\n}') == "complete"


def test_forced_text_with_the_text_of_an_added_token(
    codec: TextCodec, compiler: GrammarCompiler
) -> None:
    text = "a</think><tool_call>  <|im_end|>"
    grammar = compiler.compile(JSONSchema({"const": text}))
    matcher, written = grammar.matcher(), ""
    while not matcher.is_complete:
        words = matcher.mask()
        token = next(t for t in range(codec.vocab_size) if allows(words, t))
        matcher.consume(token)
        written += codec.read_token(token, first=False).text
    assert written == f'"{text}"'
