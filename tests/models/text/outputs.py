"""Tools and events of the tests of parsed answers."""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core, which mlx-lm imports)
from umbel.models.text.conversation import Tool
from umbel.models.text.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from umbel.models.text.formats import OutputFormat, ReasoningFormat, ToolParser, read_format
from umbel.models.text.output import OutputParser

FORMS = (
    *("function_gemma", "gemma4", "glm47", "json_tools", "kimi_k2", "kimi_k3", "laguna"),
    *("longcat", "minicpm5", "minimax_m2", "mistral", "muse_spark", "pythonic", "qwen3_coder"),
)
THINK = ReasoningFormat("<think>", "</think>")
WEATHER = Tool(
    name="get_weather",
    description="Looks out of the window.",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "at": {"type": "object"},
        },
    },
)
TIME = Tool(name="get_time", parameters={"type": "object", "properties": {}})
TOOLS = (WEATHER, TIME)

Part = tuple[Any, ...]
"""A whole part of an answer: ("text", …), ("thought", …) or ("call", name, arguments)."""


class Wrapped:
    has_thinking = True
    has_tool_calling = True
    think_start: str | None = THINK.start
    think_end: str | None = THINK.end
    structural_markers: Sequence[str] = ()
    chat_template: Any = None

    def __init__(self, form: str) -> None:
        module = import_module(f"mlx_lm.tool_parsers.{form}")
        self.tool_call_start: str | None = module.tool_call_start
        self.tool_call_end: str | None = module.tool_call_end
        self.tool_parser: ToolParser | None = module.parse_tool_call
        self.response_transitions: Mapping[str, Sequence[tuple[str, str]]] = {}
        self.response_initial_state: str | None = None


GENERIC = OutputFormat(THINK)
"""The markers of a model that thinks and knows no tools."""


def format_of(form: str) -> OutputFormat:
    return read_format(Wrapped(form))


def events_of(parser: OutputParser, pieces: Iterable[str]) -> list[OutputEvent]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.flush()


def parts(text: str, form: OutputFormat = GENERIC, **kwargs: Any) -> list[Part]:
    """Parse an answer that comes in one piece, character by character, and in threes."""
    whole, single, threes = (
        parts_of(events_of(OutputParser(form, **({"tools": TOOLS} | kwargs)), pieces))
        for pieces in ([text], text, [text[i : i + 3] for i in range(0, len(text), 3)])
    )
    assert whole == single == threes
    return whole


def parts_of(events: Iterable[OutputEvent]) -> list[Part]:
    """Join an answer's events to whole parts; check that calls are told as they must be."""
    parts: list[Part] = []
    pending: list[str] = []
    calls = 0
    for event in events:
        match event:
            case TextDelta(text) | ReasoningDelta(text):
                assert text
                kind = "text" if isinstance(event, TextDelta) else "thought"
                if parts and parts[-1][0] == kind:
                    text, _ = parts.pop()[1] + text, None
                parts.append((kind, text))
            case ToolCallStart(call, name, _):
                assert call == calls
                parts.append(("call", name))
                pending = []
            case ToolCallDelta(call, arguments):
                assert call == calls
                assert arguments
                pending.append(arguments)
            case ToolCallEnd(call):
                assert call == calls
                calls += 1
                parts[-1] = (*parts[-1], json.loads("".join(pending)))
    return parts
