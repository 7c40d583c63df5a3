"""Answers that are made to be hard to parse take time in proportion to their length."""

import time
from typing import Any

import pytest

from umbel.models.text.calls import MalformedCallError, read_calls
from umbel.models.text.events import TextDelta, ToolCallStart
from umbel.models.text.output import OutputParser

from .outputs import GENERIC, TOOLS, events_of, format_of

START, END = "<tool_call>", "</tool_call>"
UNITS = [
    *(START, START + END, START + "{" + END, START + '{"', START + '{"' + END, START + "x" + END),
    *(
        START + '{"a":"',
        START + "{" + END + '"',
        START + '{"\\',
        "<think>" + START,
        " ",
        "<",
        "\n<",
    ),
]
BODIES = [
    ("gemma4", "call:a{"),
    ("gemma4", "}call:a{"),
    ("gemma4", '<|"|>'),
    ("glm47", "<arg_key>a</arg_key>"),
    ("glm47", "a=b "),
    ("kimi_k2", "<|tool_call_begin|>"),
    ("kimi_k3", "<|open|>call"),
    ("kimi_k3", "<|open|>argument"),
    ("kimi_k3", "<|open|>json"),
    ("longcat", "<longcat_arg_key>a</longcat_arg_key>"),
    ("muse_spark", "<atem:invoke "),
    ("muse_spark", "<atem:parameter "),
    ("pythonic", "[a("),
]


def seconds(form: str, text: str, size: int) -> float:
    markers = GENERIC if form == "generic" else format_of(form)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    begin = time.process_time()
    events = events_of(OutputParser(markers, tools=TOOLS), pieces)
    taken = time.process_time() - begin
    assert all(not isinstance(e, TextDelta) or text.startswith(e.text, e.start) for e in events)
    return taken


@pytest.mark.parametrize("size", [5, 1_000_000])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("form", ["generic", "qwen3_coder"])
def test_time_grows_with_the_length(form: str, unit: str, size: int) -> None:
    bound = 10 * min(seconds(form, unit * 1500, size) for _ in range(2)) + 0.05
    # Once more, and that is all, where something else took the first one's time.
    assert any(seconds(form, unit * 6000, size) < bound for _ in range(2))


def test_ten_megabytes_of_markers_are_text() -> None:
    form = format_of("qwen3_coder")
    text = START * (10 * 2**20 // len(START))
    parser = OutputParser(form, tools=TOOLS)
    told = 0
    for i in range(0, len(text), 4096):
        events = parser.push(text[i : i + 4096])
        told += sum(len(event.text) for event in events if isinstance(event, TextDelta))
        assert i + 4096 - told < 4 * 2**20 + 10_000
    told += sum(len(event.text) for event in parser.flush() if isinstance(event, TextDelta))
    assert told == len(text)


@pytest.mark.parametrize("arguments", ['{"a": ?}', '{"a": "' + " " * (5 * 2**20) + '"}'])
def test_guaranteed_call_with_broken_arguments_ends(arguments: str) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": '
    parser = OutputParser(GENERIC, tools=TOOLS, guaranteed=True)
    events = parser.push(f"{call}{arguments}}}\n{END}") + parser.push(f"{call}{{}}}}\n{END}")
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    assert names == ["get_time", "get_time"]


@pytest.mark.parametrize(("form", "unit"), BODIES)
def test_slow_text_never_reaches_the_parser(form: str, unit: str) -> None:
    tools = format_of(form).tools
    assert tools is not None
    assert tools.parse is not None

    def parse(*_: Any) -> Any:
        raise AssertionError

    parse.__module__ = str(getattr(tools.parse, "__module__", ""))
    with pytest.raises(MalformedCallError) as refusal:
        read_calls(unit * (100_000 // len(unit)), tools._replace(parse=parse), [])
    assert not isinstance(refusal.value.__cause__, AssertionError)
