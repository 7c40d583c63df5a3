"""Answers become events: content, thoughts and calls, however the text is cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.models.text.conversation import ToolChoice
from umbel.models.text.events import TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart
from umbel.models.text.formats import HARMONY, OutputFormat
from umbel.models.text.harmony import TOKENS
from umbel.models.text.output import OutputParser

from . import test_harmony as harmony
from .outputs import FORMS, GENERIC, TOOLS, Part, events_of, format_of, parts, parts_of

PARIS = ("call", "get_weather", {"city": "Paris"})
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ONE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
TAGGED = {
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm47": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
    "</parameter>\n</invoke>\n</minimax:tool_call>",
    "mistral": f"[TOOL_CALLS][{ONE}]",
}
NOON = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
JSON_CALLS: dict[str, tuple[str, list[Part]]] = {
    "plain text": ("Hello there", [("text", "Hello there")]),
    "blanks of plain text": (" a\n\n b \n", [("text", " a\n\n b \n")]),
    "one call": (CALL, [PARIS]),
    "two calls": (f"{CALL}\n{NOON}", [PARIS, ("call", "get_time", {})]),
    "text around": (
        f"Let me look.\n\n{CALL}\nDone.",
        [("text", "Let me look."), PARIS, ("text", "Done.")],
    ),
    "thoughts": (
        f"<think>\nHm.\nWell.\n</think>\n\nSo:\n{CALL}",
        [("thought", "Hm.\nWell."), ("text", "So:"), PARIS],
    ),
    "empty thoughts": ("<think>\n\n</think>\n\nHi", [("text", "Hi")]),
    "thoughts without end": ("<think>\nHm. ", [("thought", "Hm. ")]),
    "a call ends thoughts": (
        f"<think>Hm.\n{CALL}\nHi",
        [("thought", "Hm."), PARIS, ("text", "Hi")],
    ),
    "a marker is thought of": (
        f"<think>I use <tool_call> here.</think>{CALL}",
        [("thought", "I use <tool_call> here."), PARIS],
    ),
    "a marker is spoken of": (
        f"The <tool_call> tag.\n{CALL}",
        [("text", "The <tool_call> tag."), PARIS],
    ),
    "end marker in a string": (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call>"}}</tool_call>',
        [("call", "get_weather", {"city": "</tool_call>"})],
    ),
    "line break in a string": (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb"}}</tool_call>',
        [("call", "get_weather", {"city": "a\nb"})],
    ),
    "arguments in a string": (
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        [PARIS],
    ),
    "parameters": (
        '<tool_call>{"name": "get_weather", "parameters": {"city": "Paris"}}</tool_call>',
        [PARIS],
    ),
    "a list of calls": (
        f'<tool_call>[{ONE}, {{"name": "get_time"}}]</tool_call>',
        [PARIS, ("call", "get_time", {})],
    ),
    "an unknown tool": (
        '<tool_call>{"name": "fly", "arguments": {"to": "Paris"}}</tool_call>',
        [("call", "fly", {"to": "Paris"})],
    ),
    "no end marker": (CALL.removesuffix("</tool_call>"), [PARIS]),
    "half a marker": ("a <tool_c", [("text", "a <tool_c")]),
    "half a marker, then more": ("a <tool_c> b", [("text", "a <tool_c> b")]),
    "an end marker alone": ("a</tool_call>b</think>", [("text", "a</tool_call>b</think>")]),
    "string without end before a call": (
        f'<tool_call>{{"name": "x", "arguments": {{"a": "b}}}}</tool_call>\n{CALL}',
        [("text", '<tool_call>{"name": "x", "arguments": {"a": "b}}</tool_call>'), PARIS],
    ),
}
MALFORMED = {
    "cut in the name": '<tool_call>\n{"name": "get_wea',
    "cut in the arguments": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
    "no JSON": "<tool_call>get_weather(Paris)</tool_call>",
    "no name": '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>',
    "empty name": '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    "a number as name": '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    "arguments no object": '<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>',
    "an empty list": "<tool_call>[]</tool_call>",
    "half a list": '<tool_call>[{"name": "get_time"}, 3]</tool_call>',
    "no number": '<tool_call>{"name": "get_time", "arguments": {"a": NaN}}</tool_call>',
    "junk behind": '<tool_call>{"name": "get_time", "arguments": {}} x</tool_call>',
    "nested too deep": f'<tool_call>{{"name": {"[" * 100_000}</tool_call>',
}


@pytest.mark.parametrize("name", JSON_CALLS)
@pytest.mark.parametrize("form", ["generic", "json_tools"])
def test_answers_with_calls_as_json(form: str, name: str) -> None:
    text, expected = JSON_CALLS[name]
    assert parts(text, GENERIC if form == "generic" else format_of(form)) == expected


@pytest.mark.parametrize("form", FORMS)
def test_every_model_may_use_the_generic_form(form: str) -> None:
    assert parts(f"Look:\n{CALL}\n{NOON}", format_of(form)) == [
        ("text", "Look:"),
        PARIS,
        ("call", "get_time", {}),
    ]


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("form", ["generic", "json_tools"])
def test_a_malformed_call_is_text(form: str, name: str) -> None:
    text = MALFORMED[name]
    markers = GENERIC if form == "generic" else format_of(form)
    assert parts(f"a \n{text}", markers) == [("text", f"a \n{text}")]
    if text.endswith("</tool_call>"):
        around = f"{CALL}\nb \n{text}\n c\n{CALL}"
        assert parts(around, markers) == [PARIS, ("text", f"b \n{text}\n c"), PARIS]
    assert parts(f"<think>{text}", markers) == [("thought", text)]


def test_arguments_are_the_models_own_text() -> None:
    body = '{ "name" : "get_time" , "arguments" : {"b":1,  "a": "\\u00e9"} }'
    events = OutputParser(GENERIC, tools=TOOLS).push(f"<tool_call>{body}</tool_call>")
    assert events[1] == ToolCallDelta(0, '{"b":1,  "a": "\\u00e9"}')


def test_text_events_have_their_position() -> None:
    text = f"<think>x</think>\n\nab {CALL}\n cd <tool_call>?</tool_call> ef"
    for pieces in (text, [text]):
        events = events_of(OutputParser(GENERIC, tools=TOOLS), pieces)
        told = [event for event in events if isinstance(event, TextDelta)]
        assert all(text[e.start : e.start + len(e.text)] == e.text for e in told)
        assert "".join(e.text for e in told) == "abcd <tool_call>?</tool_call> ef"


@pytest.mark.parametrize("guaranteed", [True, False])
@pytest.mark.parametrize("form", ["json_tools", "qwen3_coder", "glm47", "minimax_m2", "mistral"])
def test_repeated_forced_call_ends_the_answer(form: str, *, guaranteed: bool) -> None:
    tell = TAGGED.get(form, CALL)
    spaced = CALL.replace('{"city": "Paris"}', '{ "city" :\n"Paris"}')
    again = {"json_tools": spaced, "mistral": f"[TOOL_CALLS][{ONE}, {ONE}]"}.get(form, tell)
    text = f"{tell}\n{CALL.replace('Paris', 'Rome')}\n{NOON}\n{again}\n{NOON}"
    made = [PARIS, ("call", "get_weather", {"city": "Rome"}), ("call", "get_time", {})]
    for choice in (ToolChoice(mode="required"), ToolChoice()):
        free = choice.mode == "auto"
        parser = OutputParser(
            format_of(form), tools=TOOLS, tool_choice=choice, guaranteed=guaranteed
        )
        calls = parts_of(events_of(parser, text))
        assert calls[:4] == ([*made, PARIS] if free else made)
        assert parser.calls == (3 if not free else 6 if form == "mistral" else 5)


HARMONY_CALL = harmony.IN_CHANNEL + harmony.ARGUMENTS


@pytest.mark.parametrize("kwargs", [{"tools": ()}, {"tool_choice": ToolChoice(mode="none")}])
@pytest.mark.parametrize(
    ("form", "thought", "told"),
    [
        (GENERIC, "<think>Hm. Rain?</think>", f"a \n{CALL}\n"),
        (HARMONY, harmony.THOUGHT, HARMONY_CALL),
    ],
)
def test_without_tools_calls_are_text(
    form: OutputFormat, thought: str, told: str, kwargs: dict[str, Any]
) -> None:
    assert parts(thought + told, form, **kwargs) == [("thought", "Hm. Rain?"), ("text", told)]


@pytest.mark.parametrize(
    ("form", "call", "more"),
    [(GENERIC, CALL, NOON), (HARMONY, HARMONY_CALL, f"<|end|>{harmony.NEXT}{HARMONY_CALL}")],
)
def test_one_call_where_one_is_asked_for(form: OutputFormat, call: str, more: str) -> None:
    parser = OutputParser(form, tools=TOOLS, tool_choice=ToolChoice(parallel=False))
    events = parser.push(call[:-1])
    assert not parser.done
    events += parser.push(call[-1:] + more)
    assert parser.done
    events += parser.push(more) + parser.flush()
    assert parts_of(events) == [PARIS]


@pytest.mark.parametrize(
    ("form", "text"),
    [(GENERIC, "Hm.\n</think>\n\nHi"), (HARMONY, f"Hm.<|end|>{harmony.NEXT}{harmony.FINAL}Hi")],
)
def test_an_answer_begins_inside_thoughts_where_the_prompt_does(
    form: OutputFormat, text: str
) -> None:
    assert parts(text, form, in_reasoning=True) == [("thought", "Hm."), ("text", "Hi")]
    assert parts("\nHm.", form, in_reasoning=True) == [("thought", "Hm.")]


def test_a_model_without_thoughts_may_write_their_markers() -> None:
    parser = OutputParser(OutputFormat(), tools=())
    assert parser.push("<think> ") == [TextDelta("<think> ", 0)]


def test_text_is_streamed() -> None:
    parser = OutputParser(GENERIC, tools=TOOLS)
    assert parser.push("Hello <b> \n") == [TextDelta("Hello <b>", 0)]
    assert parser.push("<to") == []
    assert parser.push("e>") == [TextDelta(" \n<toe>", 9)]


def test_a_guaranteed_call_is_streamed() -> None:
    arguments = '{"city": "</tool_call>\\"}", "days": 3}'
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    begin = text.index(arguments)
    parser = OutputParser(GENERIC, tools=TOOLS, guaranteed=True)
    assert parser.push(text[: begin - 1]) == []
    assert parser.push(text[begin - 1 : begin + 3]) == [
        ToolCallStart(0, "get_weather"),
        ToolCallDelta(0, arguments[:3]),
    ]
    assert parser.push(text[begin + 3 : begin + 9]) == [ToolCallDelta(0, arguments[3:9])]
    events = events_of(OutputParser(GENERIC, tools=TOOLS, guaranteed=True), f"{text}\n{text}")
    assert len([e for e in events if isinstance(e, ToolCallDelta)]) > len(arguments)
    wanted = ("call", "get_weather", {"city": '</tool_call>"}', "days": 3})
    assert parts_of(events) == [wanted, wanted]


def test_a_repeated_call_ends_an_answer_of_calls() -> None:
    text = f"{CALL}\n{NOON}\n{CALL}\n{NOON}"
    parser = OutputParser(GENERIC, tools=TOOLS, guaranteed=True, constrained=True)
    assert parts_of(events_of(parser, text)) == [PARIS, ("call", "get_time", {})]
    assert parser.done


def test_call_is_held_back_while_it_may_repeat_another() -> None:
    required = ToolChoice(mode="required")
    parser = OutputParser(GENERIC, tools=TOOLS, tool_choice=required, guaranteed=True)
    parser.push(f"{CALL}\n")
    assert parser.push(CALL[: CALL.index("aris")]) == []
    assert parser.push("i") == [ToolCallStart(1, "get_weather"), ToolCallDelta(1, '{"city": "Pi')]
    assert parser.push('sa"') == [ToolCallDelta(1, 'sa"')]
    assert parser.push("}}\n</tool_call>\n") == [ToolCallDelta(1, "}"), ToolCallEnd(1)]
    assert parser.push(CALL[:-15]) == []
    assert not parser.done
    assert parser.flush() == []


def test_a_guaranteed_call_that_is_cut_has_no_end() -> None:
    parser = OutputParser(GENERIC, tools=TOOLS, guaranteed=True)
    events = events_of(parser, '<tool_call>{"name": "get_time", "arguments": {"a": "b')
    assert events[0] == ToolCallStart(0, "get_time")
    assert not any(isinstance(event, ToolCallEnd | TextDelta) for event in events)


def test_guarantee_that_is_not_kept() -> None:
    other = '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>'
    assert parts(f"{other} a <tool_call>b", guaranteed=True) == [PARIS, ("text", "a <tool_call>b")]


@pytest.mark.parametrize(
    "content",
    [
        f"Look: {CALL}",
        f'{{"a": "{CALL[:11]} <think>x</think> {CALL[11:]}"}}',
        '{"a": "<tool_call><function=get_time></function></tool_call>"}',
        f"<tool_ca {NOON}\n",
        f" \n<thin{CALL}",
    ],
)
@pytest.mark.parametrize("form", ["generic", "qwen3_coder"])
def test_constrained_content_is_text(form: str, content: str) -> None:
    markers = GENERIC if form == "generic" else format_of(form)
    held = {"constrained": True, "guaranteed": True}
    assert parts(content, markers, **held) == [("text", content)]
    thought = f"<think>Hm {CALL[:11]}.</think>\n"
    told = content.lstrip()  # the blanks belong to the marker
    assert parts(f"{thought}{told}", markers, **held)[-1] == ("text", told)


def test_constrained_content_has_its_header() -> None:
    edges = {"header": [("to=self|", "reasoning"), ("to=user|", "normal"), ("<calls>", "tool")]}
    markers = OutputFormat(transitions=edges, initial="header")
    assert markers.content_start == "to=user|"
    assert parts("to=user|{}", markers, constrained=True) == [("text", "{}")]
    assert parts("{}", markers, constrained=True) == []
    assert GENERIC.content_start == ""


def test_calls_instead_of_constrained_content() -> None:
    calls = [PARIS, ("call", "get_time", {})]
    assert parts(f"{CALL}\n{NOON}", constrained=True, guaranteed=True) == calls
    thought = parts(f"<think>Hm.</think>\n\n{CALL}\n{NOON}", constrained=True, guaranteed=True)
    assert thought == [("thought", "Hm."), *calls]


GREAT = '{"days":  [1e999, -1E+400, 1.50]}'


@pytest.mark.parametrize(
    "body",
    [
        f'{{"name": "get_weather", "arguments": {GREAT}}}',
        f'[{{"name": "get_weather", "arguments": {GREAT}}} , {{"name": "get_time"}}]',
        f'{{"name": "get_weather", "arguments": {json.dumps(GREAT)}}}',
    ],
)
def test_a_number_that_no_float_holds_arrives_as_it_was_written(body: str) -> None:
    events = events_of(OutputParser(GENERIC, tools=TOOLS), [f"<tool_call>{body}</tool_call>"])
    assert events[:2] == [ToolCallStart(0, "get_weather"), ToolCallDelta(0, GREAT)]


def test_a_number_that_no_float_holds_in_another_form() -> None:
    text = '<|tool_call_start|>[get_weather(days=1e999, at={"a": [-1e999]})]<|tool_call_end|>'
    (_, told, _) = events_of(OutputParser(format_of("pythonic"), tools=TOOLS), [text])
    assert told == ToolCallDelta(0, '{"days": 1e999, "at": {"a": [-1e999]}}')


WORDS = {
    "generic": [CALL, NOON, *MALFORMED.values(), "<think>", "</think>", "<tool_call>"],
    "harmony": [
        *(*TOKENS, harmony.NEXT, harmony.THOUGHT, harmony.FINAL, harmony.IN_CHANNEL),
        *(harmony.IN_ROLE, harmony.ARGUMENTS, *harmony.MALFORMED.values(), "to=", "final"),
    ],
}


@pytest.mark.parametrize("form", WORDS)
@given(data=st.data())
def test_cutting_the_text_changes_nothing(form: str, data: st.DataObject) -> None:
    markers = HARMONY if form == "harmony" else GENERIC
    words = [w for w in WORDS[form] if len(w) < 1000]
    words += ["</tool_call>", "a", " ", "\n\n", '{"', "}", "<", "é"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    drawn = ("in_reasoning", "constrained") if form == "generic" else ()
    kwargs: dict[str, Any] = {name: data.draw(st.booleans()) for name in drawn}
    events = events_of(OutputParser(markers, tools=TOOLS, **kwargs), pieces)
    whole = events_of(OutputParser(markers, tools=TOOLS, **kwargs), [text])
    assert parts_of(events) == parts_of(whole)
    told = [event for event in events if isinstance(event, TextDelta)]
    assert all(text[event.start :].startswith(event.text) for event in told)


@given(st.data())
def test_nothing_is_lost(data: st.DataObject) -> None:
    words = [w for w in MALFORMED.values() if w.endswith("</tool_call>") and len(w) < 1000]
    words += ["a", " ", "\n\n", "<tool_call>", "</tool_call>", "<tool", "[", "{", "é", "</think>"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=12)))
    size = data.draw(st.integers(1, 9))
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    parsed = parts_of(events_of(OutputParser(GENERIC, tools=TOOLS), pieces))
    assert parsed == ([("text", text)] if text else [])
