"""Answers of Anthropic's messages, with the official SDK as the reader."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest.mock import ANY

import anthropic
import httpx2
import msgspec
import pytest
from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from jiter import from_json

from umbel.daemon.http.failures import as_api_error
from umbel.daemon.protocols.content import hidden_in
from umbel.daemon.protocols.messages_answers import MessageAnswers
from umbel.daemon.requests.answer_reader import AnswerReader
from umbel.daemon.requests.generation import Generation, Generations
from umbel.models.text.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from umbel.models.text.json_text import close_json
from umbel.scheduler.errors import UnavailableError
from umbel.scheduler.request import FinishReason

from ..answers import named_events
from ..fakes import make_request

Script = list[list[OutputEvent]]
"""Texts of the tokens."""


class ScriptedText:
    """Codec and parser of a script: a token is the number of its line."""

    in_reasoning = False
    done = False

    def __init__(self, script: Script) -> None:
        self._script = script

    def detokenizer(self, _markup: frozenset[int], *, continues: bool) -> "ScriptedText":
        assert not continues
        return self

    def push(self, token: Any) -> Any:
        return token if isinstance(token, str) else str(token)

    def flush(self) -> list[OutputEvent]:
        return []


class ScriptedParser(ScriptedText):
    def push(self, token: Any) -> Any:
        return self._script[int(token)]


class Answer(NamedTuple):
    """An answer, streamed and whole."""

    stream: bytes
    whole: dict[str, Any]


def generation_of(
    script: Script, *, stops: list[str] | None = None, max_tokens: int = 100
) -> Generation:
    """Make the generation of a script, without an engine."""
    codec: Any = ScriptedText(script)
    parser: Any = ScriptedParser(script)
    reader = AnswerReader(codec, parser, stops or [], logprobs=False)
    unused: Any = None  # it is never submitted
    request = make_request("req-1", list(range(10)), max_tokens=max_tokens)
    generation = Generation(request, unused, reader, unused, 0.0)
    generation.cached_tokens = 7
    return generation


def answered(
    script: Script,
    finish: FinishReason = FinishReason.STOP,
    *,
    shows_thinking: bool = True,
    stops: list[str] | None = None,
    room: int = 100,
) -> Answer:
    """Answer with a script, streamed and whole."""
    generation = generation_of(script, stops=stops, max_tokens=room)
    answers = MessageAnswers(
        "req-1",
        Generations([generation]),
        "tiny",
        max_tokens=100,
        shows_thinking=shows_thinking,
    )
    sent = [answers.opening(), answers.keepalive(), answers.began(0)]
    for token in range(len(script)):
        if not generation.reader.done:
            generation.tokens.append(token)
            sent.append(answers.deltas(0, generation.reader.push(token, None)))
    sent.append(answers.deltas(0, generation.reader.flush()))
    generation.finish_reason = finish
    sent += [answers.ended(0), answers.closing()]
    return Answer(b"".join(sent), msgspec.json.decode(msgspec.json.encode(answers.whole())))


def read(stream: bytes) -> Message:
    """Read a stream as the SDK does."""
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(
        lambda _: httpx2.Response(200, headers=headers, content=stream)
    )
    http = anthropic.DefaultHttpxClient(transport=transport)
    with (
        anthropic.Anthropic(api_key="-", max_retries=0, http_client=http) as client,
        client.messages.stream(
            model="tiny", max_tokens=1, messages=[{"role": "user", "content": "x"}]
        ) as events,
    ):
        return events.get_final_message()


def shown(message: Message) -> list[dict[str, Any]]:
    """Return the content that the SDK found, as JSON would have it."""
    told = ("type", "text", "thinking", "signature", "id", "name", "input")
    return [
        {key: value for key, value in block.to_dict().items() if key in told}
        for block in message.content
    ]


def call(number: int, name: str, *arguments: str) -> list[OutputEvent]:
    more = [ToolCallDelta(number, fragment) for fragment in arguments]
    return [ToolCallStart(number, name, f"call_{number}"), *more, ToolCallEnd(number)]


THOUGHT_TEXT_TOOLS: Script = [
    [ReasoningDelta("Hm")],
    [ReasoningDelta(", ü.")],
    [TextDelta("Let ", 10)],
    [TextDelta("me.", 14)],
    call(0, "look", '{"a":', "1}"),
    call(1, "wait"),
]


def test_stream_and_whole_answer_have_the_same_content() -> None:
    stream, whole = answered(THOUGHT_TEXT_TOOLS)
    message = read(stream)
    assert shown(message) == whole["content"]
    assert whole["content"] == [
        {"type": "thinking", "thinking": "Hm, ü.", "signature": "umbel."},
        {"type": "text", "text": "Let me."},
        {"type": "tool_use", "id": ANY, "name": "look", "input": {"a": 1}},
        {"type": "tool_use", "id": ANY, "name": "wait", "input": {}},
    ]
    assert message.stop_reason == whole["stop_reason"] == "tool_use"
    assert message.stop_sequence is whole["stop_sequence"] is None
    assert message.id == whole["id"] == "msg_1"
    assert message.usage.to_dict() == whole["usage"]


def test_usage_tells_cached_tokens_apart() -> None:
    """message_start has the prompt's share already."""
    stream, whole = answered([[TextDelta("x", 0)]])
    assert whole["usage"] == {
        "input_tokens": 3,
        "cache_read_input_tokens": 7,
        "cache_creation_input_tokens": 0,
        "output_tokens": 1,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    start = dict(named_events(stream))["message_start"]["message"]["usage"]
    assert start == whole["usage"] | {"output_tokens": 0}


def test_hidden_thinking_is_in_its_signature() -> None:
    """The client gets pings meanwhile, and can send the signature back."""
    stream, whole = answered(THOUGHT_TEXT_TOOLS, shows_thinking=False)
    (thought, *_) = shown(read(stream))
    assert thought == whole["content"][0]
    assert thought["thinking"] == ""
    assert hidden_in(thought["signature"]) == "Hm, ü."
    assert b"Hm" not in stream
    names = [name for name, _ in named_events(stream)]
    assert names[2:6] == ["content_block_start", "ping", "ping", "content_block_delta"]


@pytest.mark.parametrize(
    ("script", "finish", "room", "reason"),
    [
        ([[TextDelta("x", 0)]], FinishReason.STOP, 100, "end_turn"),
        ([[TextDelta("x", 0)]], FinishReason.LENGTH, 100, "max_tokens"),
        ([[TextDelta("x", 0)]], FinishReason.LENGTH, 50, "model_context_window_exceeded"),
        ([call(0, "look")], FinishReason.STOP, 100, "tool_use"),
        ([call(0, "look")], FinishReason.LENGTH, 100, "max_tokens"),
        ([], FinishReason.STOP, 100, "end_turn"),
    ],
)
def test_stop_reasons(script: Script, finish: FinishReason, room: int, reason: str) -> None:
    """The context may end an answer before max_tokens does."""
    stream, whole = answered(script, finish, room=room)
    assert read(stream).stop_reason == whole["stop_reason"] == reason


def test_stop_sequence_is_named() -> None:
    script: Script = [[TextDelta("one EN", 0)], [TextDelta("D two", 6)]]
    stream, whole = answered(script, stops=["END"])
    message = read(stream)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")
    assert shown(message) == whole["content"] == [{"type": "text", "text": "one "}]


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ("", {}),
        ('{"path": "/', {}),
        ('{"force": true, "path": "/', {"force": True}),
        ('{"paths": ["/a", "/b, true, [{', {"paths": ["/a"]}),
        ('{"paths": ["/a", {"b": [1, 2', {"paths": ["/a", {"b": [1, 2]}]}),
    ],
)
def test_cut_call_keeps_its_complete_arguments(written: str, kept: dict[str, Any]) -> None:
    """Its stop reason says that it is not complete."""
    started: list[OutputEvent] = [ToolCallStart(0, "rm")]
    started += [ToolCallDelta(0, written)] if written else []
    stream, whole = answered([[TextDelta("So", 0)], started], FinishReason.LENGTH)
    message = read(stream)
    assert shown(message) == whole["content"]
    assert whole["content"][1] == {"type": "tool_use", "id": ANY, "name": "rm", "input": kept}
    assert message.stop_reason == whole["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("ascii_only", [False, True])
def test_json_is_closed_as_the_sdk_closes_it(*, ascii_only: bool) -> None:
    """Wherever it is cut; complete JSON stays as it is."""
    value = {"a": [1, -2.5e-9, {"b": {}, '"': "x, {\\"}], "ü": {"c": [None, True, [], [[False]]]}}
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert close_json(text) == text
    for cut in (text[:end] for end in range(1, len(text))):
        assert json.loads(close_json(cut)) == from_json(cut.encode(), partial_mode=True)


def test_infinite_number_arrives_as_written() -> None:
    generation = generation_of([call(0, "look", '{"a":1e999}')])
    generation.reader.push(0, None)
    whole = MessageAnswers(
        "req-1", Generations([generation]), "tiny", max_tokens=1, shows_thinking=True
    ).whole()
    assert b'"input":{"a":1e999}' in msgspec.json.encode(whole)


def test_blocks_keep_their_order() -> None:
    """Text behind a call is a block of its own, and so is a second thought."""
    script: Script = [
        [TextDelta("Let me.", 0)],
        call(0, "look", '{"a":1}'),
        [ReasoningDelta("Hm.")],
        [TextDelta("So", 20)],
        [TextDelta(".", 22)],
        [ReasoningDelta("Oh.")],
    ]
    stream, whole = answered(script)
    kinds = ["text", "tool_use", "thinking", "text", "thinking"]
    assert [block["type"] for block in whole["content"]] == kinds
    assert shown(read(stream)) == whole["content"]


def test_error_in_a_stream_is_the_sdks_exception() -> None:
    generation = generation_of([])
    answers = MessageAnswers(
        "req-1", Generations([generation]), "tiny", max_tokens=1, shows_thinking=True
    )
    failed = answers.failure(as_api_error(UnavailableError("stopping", retry_after=1)))
    with pytest.raises(anthropic.APIStatusError) as raised:
        read(answers.began(0) + failed)
    assert raised.value.body == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "stopping"},
        "request_id": "req-1",
    }


def test_stream_has_one_message_start() -> None:
    script: Script = [[TextDelta("x", 0)]]
    generation = generation_of(script)
    answers = MessageAnswers(
        "req-1", Generations([generation]), "tiny", max_tokens=1, shows_thinking=True
    )
    first = answers.deltas(0, generation.reader.push(0, None))
    names = [name for name, _ in named_events(first + answers.began(0))]
    assert names == ["message_start", "content_block_start", "content_block_delta"]


_words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    kinds = st.lists(st.sampled_from(["text", "thought", "call", "nothing"]), max_size=12)
    script: Script = []
    calls = start = 0
    for kind in draw(kinds):
        match kind:
            case "text":
                words = draw(_words)
                script.append([TextDelta(words, start)])
                start += len(words)
            case "thought":
                script.append([ReasoningDelta(draw(_words))])
            case "call":
                arguments = msgspec.json.encode(draw(st.dictionaries(_words, _words))).decode()
                cut = draw(st.integers(0, len(arguments)))
                fragments = [part for part in (arguments[:cut], arguments[cut:]) if part]
                script.append(call(calls, "look", *fragments))
                calls += 1
                start += len(arguments)
            case _:
                script.append([])
    return script


def balanced(events: Iterable[tuple[str, Any]]) -> list[str]:
    """Check the order of events; return the kinds of the blocks."""
    order = [(name, data) for name, data in events if name != "ping"]
    assert [name for name, _ in order[-2:]] == ["message_delta", "message_stop"]
    assert order[0][0] == "message_start"
    kinds: list[str] = []
    is_open = False
    deltas = {
        "text": ("text_delta",),
        "thinking": ("thinking_delta", "signature_delta"),
        "tool_use": ("input_json_delta",),
    }
    for name, data in order[1:-2]:
        if name == "content_block_start":
            assert not is_open
            assert data["index"] == len(kinds)
            kinds.append(data["content_block"]["type"])
            is_open = True
            continue
        assert is_open
        assert data["index"] == len(kinds) - 1
        if name == "content_block_delta":
            assert data["delta"]["type"] in deltas[kinds[-1]]
        else:
            assert name == "content_block_stop"
            is_open = False
    assert not is_open
    return kinds


@settings(deadline=None)
@given(script=scripts(), shows_thinking=st.booleans())
def test_any_order_of_parts_is_balanced(script: Script, *, shows_thinking: bool) -> None:
    """Blocks begin and end in order, and the SDK finds the whole answer's content in them."""
    stream, whole = answered(script, shows_thinking=shows_thinking)
    kinds = balanced(named_events(stream))
    found = shown(read(stream))
    assert [block["type"] for block in found] == kinds

    assert found == whole["content"]
