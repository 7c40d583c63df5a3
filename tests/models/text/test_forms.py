"""Calls in the forms of all models that mlx-lm has a parser for, with its real parsers."""

import pytest

from umbel.models.text.conversation import Tool
from umbel.models.text.events import ToolCallStart
from umbel.models.text.formats import OutputFormat, ToolFormat
from umbel.models.text.output import OutputParser

from .outputs import FORMS, THINK, TOOLS, Part, events_of, format_of, parts, parts_of

NOON: Part = ("call", "get_time", {})
THREE: Part = ("call", "get_weather", {"city": "Paris", "days": 3})

# Texts between the markers, and the calls in them.
CALLS: list[tuple[str, str, list[Part]]] = [
    ("function_gemma", "call:get_weather{city:<escape>Paris<escape>,days:3}", [THREE]),
    (
        "function_gemma",
        "call:get_weather{city:<escape>Paris, France<escape>}",
        [("call", "get_weather", {"city": "Paris, France"})],
    ),
    ("gemma4", 'call:get_weather{city:<|"|>Paris<|"|>,days:3}', [THREE]),
    (
        "gemma4",
        'call:get_weather{city:<|"|>{Paris}<|"|>,at:{hour:9}}call:get_time{}',
        [("call", "get_weather", {"city": "{Paris}", "at": {"hour": 9}}), NOON],
    ),
    (
        "glm47",
        (
            "get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        ),
        [THREE],
    ),
    ("glm47", "get_time", [NOON]),
    ("glm47", '{"function": "get_weather", "arguments": {"city": "Paris", "days": 3}}', [THREE]),
    ("json_tools", '\n{"name": "get_time", "arguments": {}}\n', [NOON]),
    (
        "kimi_k2",
        (
            "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.get_time:1'
            "<|tool_call_argument_begin|>{}<|tool_call_end|>"
        ),
        [THREE, NOON],
    ),
    (
        "kimi_k3",
        (
            '<|open|>call tool="get_weather" index="1"<|sep|>'
            '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
            '<|open|>argument key="days" type="integer"<|sep|>3<|close|>argument<|sep|>'
            "<|close|>call<|sep|>"
        ),
        [THREE],
    ),
    (
        "kimi_k3",
        (
            '<|open|>call tool="get_weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
            '{"city": "Paris", "days": 3}<|close|>json<|sep|><|close|>call<|sep|>'
            '<|open|>call tool="get_time" index="2"<|sep|><|close|>call<|sep|>'
        ),
        [THREE, NOON],
    ),
    (
        "laguna",
        (
            "get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
            "<arg_key>days</arg_key><arg_value>3</arg_value>"
        ),
        [THREE],
    ),
    (
        "longcat",
        (
            "get_weather\n<longcat_arg_key>city</longcat_arg_key>"
            "<longcat_arg_value>Paris</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>"
            "<longcat_arg_value>3</longcat_arg_value>"
        ),
        [THREE],
    ),
    ("longcat", '{"name": "get_time", "arguments": {}}', [NOON]),
    (
        "minicpm5",
        '"get_weather"><param name="city"><![CDATA[Paris]]></param><param name="days">3</param>',
        [THREE],
    ),
    (
        "minimax_m2",
        (
            '\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
            '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n'
        ),
        [THREE, NOON],
    ),
    ("mistral", 'get_weather[ARGS]{"city": "Paris", "days": 3}', [THREE]),
    ("mistral", "get_time[ARGS]{}[TOOL_CALLS]get_time[ARGS]{}", [NOON, NOON]),
    ("mistral", ' [{"name": "get_time", "arguments": {}, "id": "abcdefghi"}]', [NOON]),
    (
        "muse_spark",
        (
            '\n<atem:invoke name="get_weather">\n<atem:parameter name="city">"Paris"'
            '</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n'
        ),
        [THREE],
    ),
    ("pythonic", '[get_weather(city="Paris", days=3), get_time()]', [THREE, NOON]),
    (
        "pythonic",
        '[get_weather(city="a)]", at={"hour": true})]',
        [("call", "get_weather", {"city": "a)]", "at": {"hour": True}})],
    ),
    (
        "qwen3_coder",
        (
            "\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n"
        ),
        [THREE],
    ),
]
MALFORMED = [
    ("function_gemma", "call:get_weather(Paris)"),
    ("function_gemma", "call:get_time{}call:get_weather(Paris)"),
    ("function_gemma", "call:get_weather{city:<escape>Paris}"),
    ("gemma4", "call:get_weather{city:}"),
    ("gemma4", 'call:get_weather{city:<|"|>Paris}'),
    ("glm47", "I would look at the sky"),
    ("glm47", "hello"),
    ("glm47", "get_weather<arg_key>city</arg_key><arg_value>Par"),
    ("json_tools", '{"name": "get_time", "arguments": 3}'),
    ("kimi_k2", "<|tool_call_begin|>get_time<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    (
        "kimi_k2",
        "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{<|tool_call_end|>",
    ),
    (
        "kimi_k3",
        (
            '<|open|>call tool="get_time"<|sep|><|close|>call<|sep|>'
            '<|open|>call index="2"<|sep|><|close|>call<|sep|>'
        ),
    ),
    ("kimi_k3", '<|open|>call tool="get_time"<|sep|><|open|>argument key="a"<|sep|>b'),
    ("laguna", "hello there"),
    ("longcat", "get_time"),
    ("longcat", "get_time<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>b"),
    ("minicpm5", "hello"),
    ("minicpm5", '"get_weather"><param name="city">Paris'),
    ("minimax_m2", "get_time"),
    ("minimax_m2", '<invoke name="get_time">\n</invoke>\n<invoke name="get_weather'),
    ("mistral", 'get_weather[ARGS]{"city": "Par'),
    ("mistral", '[{"name": "get_time"'),
    ("mistral", '[{"name": "get_time"}, {"name": 3}]'),
    ("muse_spark", "get_time"),
    ("muse_spark", '<atem:invoke name="get_time"><atem:parameter name="a">b</atem:invoke>'),
    ("pythonic", "get_time()"),
    ("pythonic", "[get_weather(Paris)]"),
    ("pythonic", "[get_weather(city=1), get_time(3)]"),
    ("qwen3_coder", "\n<function=get_time>\n"),
    ("qwen3_coder", "\n<function=get_weather>\n<parameter=days>\nx\n</parameter>\n</function>\n"),
    ("qwen3_coder", "\n<function=get_weather>\n<parameter=city>\nParis\n</function>\n"),
]


def markers(form: OutputFormat) -> ToolFormat:
    assert form.tools is not None
    return form.tools


def test_the_tables_have_all_forms() -> None:
    assert {name for name, *_ in CALLS} == {name for name, _ in MALFORMED} == set(FORMS)


@pytest.mark.parametrize(("name", "body", "expected"), CALLS)
def test_a_call_in_the_models_own_form(name: str, body: str, expected: list[Part]) -> None:
    form = format_of(name)
    call = markers(form).start + body + markers(form).end
    assert parts(call, form) == expected
    before = f"<think>\nHm.\n</think>\n\nSo:\n{call}"
    assert parts(before, form) == [("thought", "Hm."), ("text", "So:"), *expected]
    if markers(form).end:
        after = f"{call}\n{call}\nDone."
        assert parts(after, form) == [*expected, *expected, ("text", "Done.")]
    assert parts(f"<think>Hm. {call}", form) == [("thought", "Hm."), *expected]


@pytest.mark.parametrize(("name", "body"), MALFORMED)
def test_a_malformed_call_in_the_models_own_form(name: str, body: str) -> None:
    form = format_of(name)
    call = markers(form).start + body + markers(form).end
    assert parts(f"So: {call} ", form) == [("text", f"So: {call} ")]
    assert parts(f"<think>{call}", form) == [("thought", call)]
    if markers(form).end:
        assert parts(f"<think>{call}</think>Hi", form) == [("thought", call), ("text", "Hi")]


@pytest.mark.parametrize(("name", "body", "expected"), CALLS)
def test_truncated_call_is_text(name: str, body: str, expected: list[Part]) -> None:
    form = format_of(name)
    for end in range(len(body) - 1):
        text = markers(form).start + body[:end]
        told = parts_of(events_of(OutputParser(form, tools=TOOLS), [text]))
        assert told in ([("text", text)], expected[:1], expected)
        assert told == [("text", text)] or not markers(form).end or body.lstrip()[0] in "{["


@pytest.mark.parametrize("name", [form for form in FORMS if markers(format_of(form)).end])
def test_a_marker_in_thoughts_hides_no_call(name: str) -> None:
    form = format_of(name)
    body, expected = next((body, calls) for own, body, calls in CALLS if own == name)
    call = markers(form).start + body + markers(form).end
    text = f"<think>I write {markers(form).start} and so on.</think>\n{call}"
    thought = ("thought", f"I write {markers(form).start} and so on.")
    assert parts(text, form) == [thought, *expected]


def test_a_models_own_ids_are_passed_on() -> None:
    form = format_of("kimi_k2")
    body = next(body for name, body, _ in CALLS if name == "kimi_k2")
    text = markers(form).start + body + markers(form).end
    starts = [
        event
        for event in OutputParser(form, tools=TOOLS).push(text)
        if isinstance(event, ToolCallStart)
    ]
    assert [s.id for s in starts] == ["functions.get_weather:0", "functions.get_time:1"]


def test_types_come_from_the_schema() -> None:
    form = format_of("qwen3_coder")
    text = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    for kind, value in (("string", "1"), ("integer", 1)):
        tool = Tool(name="f", parameters={"properties": {"a": {"type": kind}}})
        assert parts(text, form, tools=(tool,)) == [("call", "f", {"a": value})]


def test_structural_markers_are_markup() -> None:
    form = OutputFormat(THINK, structural=("<|open|>response<|sep|>", "<|close|>response<|sep|>"))
    text = "<think>a</think>\n<|open|>response<|sep|>b <|close|>response<|sep|>"
    assert parts(text, form) == [("thought", "a"), ("text", "b")]


MUSE = {
    "header": [
        ("to=self<|message|>", "reasoning"),
        ("to=user<|message|>", "normal"),
        ("<atem:function_calls>", "tool"),
    ],
    "reasoning": [("<|eom|>", "header")],
    "normal": [("<|eom|>", "header"), ("<|eot|>", "normal")],
}


def muse() -> OutputFormat:
    tools = format_of("muse_spark").tools
    return OutputFormat(None, tools, transitions=MUSE, initial="header")


def test_headers_are_markup() -> None:
    call = next(body for name, body, _ in CALLS if name == "muse_spark")
    text = (
        "to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Look:<|eom|>"
        "<|start|>assistant to=get_weather<|message|>"
        f"<atem:function_calls>{call}</atem:function_calls>"
    )
    assert parts(text, muse()) == [("thought", "Hm."), ("text", "Look:"), THREE]


def test_a_call_behind_a_header_is_text_where_none_is_asked_for() -> None:
    text = "to=f<|message|><atem:function_calls>x</atem:function_calls>"
    assert parts(text, muse(), tools=()) == [
        ("text", "<atem:function_calls>x</atem:function_calls>")
    ]
    assert parts(text, muse()) == [("text", "<atem:function_calls>x</atem:function_calls>")]
