"""Forms of tool calls, as grammars."""

from collections.abc import Callable, Iterator
from typing import Any

from ...errors import GrammarError
from ..conversation import Tool, ToolCalls
from ..harmony import COMMENTARY, ENDS, FINAL, NEXT, RECIPIENT
from .lark import Lark
from .narrowing import Narrowing, UnwritableError
from .schema_check import types_of, within
from .tagged_calls import GLM, MINIMAX, QWEN3_CODER, add_tagged

_START, _END = "<tool_call>", "</tool_call>"
_TAGGED = {"qwen3_coder": QWEN3_CODER, "glm47": GLM, "minimax_m2": MINIMAX}
NARROWED = frozenset({*_TAGGED, "kimi_k2"})
"""Forms that cannot write the values of some schemas."""

MOST_CALLS = 16
"""Calls of an answer that has only calls: models that may not stop repeat themselves."""

FORMS = ("generic", "json_tools", "mistral", "harmony", *sorted(NARROWED))
"""Forms of calls that have a grammar, by the names of mlx-lm's parsers."""


def call_form(native: str | None) -> str:
    """Name the form of a model's calls: its own if that has a grammar, else `generic`."""
    return native if native in FORMS else "generic"


def add_calls(lark: Lark, calls: ToolCalls, content: str | None = None) -> None:
    """Write the rule `answer`; `content` is that of an answer without calls, None any text.

    Raises:
        GrammarError: there is no tool, no such form, or a schema is not supported.
        UnwritableError: this form cannot write the calls.
    """
    if not calls.tools:
        raise GrammarError("there is no tool to call")
    if calls.form not in FORMS:
        raise GrammarError(f"there is no grammar for calls as {calls.form!r}")
    if calls.form == "harmony":
        _add_harmony(lark, calls, content)
        return
    if calls.form in NARROWED and not (calls.forced or all(tool.strict for tool in calls.tools)):
        raise UnwritableError("a tool whose arguments are free")
    start, body = _BODIES[calls.form](lark, calls)
    lark.rule("body", body)
    if calls.forced or content is not None:
        lark.rule("call", f"{lark.marker(start)} body")
        between = "" if calls.form == "mistral" else lark.text("\n")
        between += "?" if calls.form == "glm47" else ""  # GLM's templates differ
        more = f"({between} call){{0,{MOST_CALLS - 1}}}"
        several = "call" if calls.form in _SECTIONS or not calls.parallel else f"call {more}"
        lark.rule("answer", several if calls.forced else f"{several} | {content}")
    else:
        others = [other for other in calls.starts if other != start]
        head, text = lark.up_to(start, others), lark.free(others)
        several = f"({head} body)* {text}"
        lark.rule("answer", several if calls.parallel else f"{head} body | {text}")


def _arguments(lark: Lark, calls: ToolCalls) -> Iterator[tuple[Tool, Any]]:
    for tool in calls.tools:
        arguments: Any = {"type": "object"}
        if calls.forced or tool.strict:
            arguments = lark.schemas.read(tool.parameters, tool.place)
            if arguments is False or "object" not in types_of(arguments):
                raise GrammarError("must allow an object", within(tool.place, "type"))
            arguments = arguments | {"type": "object"}
        yield tool, arguments


def _named(lark: Lark, calls: ToolCalls) -> dict[str, Any]:
    options = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool, arguments in _arguments(lark, calls)
    ]
    return {"anyOf": options}


def _json_body(lark: Lark, calls: ToolCalls) -> tuple[str, str]:
    body, line = lark.json(_named(lark, calls)), lark.text("\n")
    return _START, f"{line} {body} {line} {lark.marker(_END)}"


def _mistral_body(lark: Lark, calls: ToolCalls) -> tuple[str, str]:
    """Write either form: newer models have a token between name and arguments."""
    start, between = "[TOOL_CALLS]", "[ARGS]"
    if between in lark.added:
        headed = [
            f"{lark.text(tool.name)} {lark.marker(between)} {lark.json(arguments)}"
            for tool, arguments in _arguments(lark, calls)
        ]
        return start, " | ".join(headed)
    most = MOST_CALLS if calls.parallel else 1
    listed = {"type": "array", "minItems": 1, "maxItems": most, "items": _named(lark, calls)}
    return start, lark.json(listed)


def _add_harmony(lark: Lark, calls: ToolCalls, content: str | None) -> None:
    """Write one call, which ends the answer, or content; free text may stand before a call."""
    behind = lark.text(" "), lark.marker("<|constrain|>"), lark.text("json")
    for number, (tool, arguments) in enumerate(_arguments(lark, calls)):
        body = f"{lark.marker('<|message|>')} {lark.json(arguments)}"
        before = lark.text(f" {RECIPIENT}{tool.name}")
        in_channel = lark.marker(f"<|channel|>commentary {RECIPIENT}{tool.name}")
        in_role = f"{before} {lark.marker('<|channel|>commentary json')}"
        lark.rule(f"call_{number}", f"({in_channel} {' '.join(behind)} | {in_role}) {body}")
    called = " | ".join(f"call_{number}" for number in range(len(calls.tools)))
    if content is not None:
        lark.rule("answer", f"{called} | {content}")  # text before a call would be content, too
        return
    words = lark.up_to(f"{ENDS[0]}{NEXT}", calls.starts)
    last = called if calls.forced else f"{called} | {lark.marker(FINAL)} {lark.free(calls.starts)}"
    lark.rule("answer", f"({lark.marker(COMMENTARY)} {words})? ({last})")


def _tagged_body(lark: Lark, calls: ToolCalls) -> tuple[str, str]:
    lark.rule("named", add_tagged(lark, _TAGGED[calls.form], list(_arguments(lark, calls))))
    if calls.form == "minimax_m2":
        ends = lark.text("\n"), _several(calls), lark.marker("</minimax:tool_call>")
        return "<minimax:tool_call>", " ".join(ends)
    return _START, f"named {lark.marker(_END)}"


def _kimi_body(lark: Lark, calls: ToolCalls) -> tuple[str, str]:
    """Write one section with all calls, each with a number."""
    names = ("_call_begin", "_call_argument_begin", "_call_end", "_calls_section_end")
    begin, between, end, last = (f"<|tool{name}|>" for name in names)
    start = "<|tool_calls_section_begin|>"
    narrowing = Narrowing(lark.schemas, (start, begin, between, end, last))
    lark.rule("NUMBER", "/[0-9]{1,3}/")
    headed = []
    for tool, arguments in _arguments(lark, calls):
        head = f"{lark.marker(begin)} {lark.text(f'functions.{tool.name}:')} NUMBER"
        body = lark.json(narrowing.schema(arguments))
        headed.append(f"{head} {lark.marker(between)} {body} {lark.marker(end)}")
    lark.rule("named", " | ".join(headed))
    return start, f"{_several(calls)} {lark.marker(last)}"


def _several(calls: ToolCalls) -> str:
    return f"named{{1,{MOST_CALLS}}}" if calls.parallel else "named"


_SECTIONS = frozenset({"kimi_k2", "minimax_m2"})
"""Forms with several calls between one pair of markers."""

_BODIES: dict[str, Callable[[Lark, ToolCalls], tuple[str, str]]] = {
    "generic": _json_body,
    "json_tools": _json_body,
    "mistral": _mistral_body,
    **dict.fromkeys(_TAGGED, _tagged_body),
    "kimi_k2": _kimi_body,
}
"""Each form's start marker, and the rule after it."""
