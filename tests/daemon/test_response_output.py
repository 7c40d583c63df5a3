"""A response's items and events: balanced, in order, and what OpenAI's own types allow."""

import asyncio
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from openai import omit
from openai._models import construct_type_unchecked
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from umbel.daemon.http.failures import APIError
from umbel.daemon.protocols import response_output
from umbel.daemon.protocols.content import hidden_in
from umbel.daemon.protocols.response_answers import ResponseAnswers, ResponseObject
from umbel.daemon.protocols.response_output import Output
from umbel.daemon.protocols.response_tools import CalledTool
from umbel.daemon.protocols.responses import ResponsesRequest
from umbel.daemon.requests.answer_reader import Delta, TokenLogProb, Told, TopLogProb
from umbel.daemon.requests.generation import Generations, Usage
from umbel.models.text.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from umbel.scheduler.request import FinishReason

from ..answers import named_events

STRICT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALLED = {
    "add": CalledTool("add"),
    "agents__close": CalledTool("close", namespace="agents"),
    "patch": CalledTool("patch", custom=True),
}
TOOLS = [
    {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False},
    {"type": "namespace", "name": "agents", "description": "d", "tools": []},
    {"type": "custom", "name": "patch"},
]


class Ended:
    def __init__(self, reason: FinishReason | None) -> None:
        self.finish_reason = reason


class Answered:
    """Answers as an encoder sees them."""

    def __init__(self, reason: FinishReason | None) -> None:
        self.answers = [Ended(reason)]
        self.usage = Usage(10, 4, 6, 2)


def encoder(
    reason: FinishReason | None = FinishReason.STOP,
    *,
    logprobs: bool = False,
    summarized: bool = False,
    encrypted: bool = False,
) -> ResponseAnswers:
    body = msgspec.json.decode(b'{"input": "hi", "max_output_tokens": 5}', type=ResponsesRequest)
    shown = [Raw(msgspec.json.encode(tool)) for tool in TOOLS]
    made = ResponseObject("resp_1", "tiny", body, shown)
    answered = cast("Generations", Answered(reason))
    output = Output(CALLED, logprobs=logprobs, summarized=summarized, encrypted=encrypted)
    return ResponseAnswers(made, answered, output)


def read(stream: bytes) -> list[dict[str, Any]]:
    return [event for _, event in named_events(stream)]


def streamed(
    events: list[OutputEvent], reason: FinishReason = FinishReason.STOP, **options: bool
) -> list[dict[str, Any]]:
    answers = encoder(reason, **options)
    stream = answers.opening() + answers.began(0)
    for event in events:
        stream += answers.deltas(0, [Delta(event)])
    return read(stream + answers.ended(0) + answers.closing())


def call(number: int, name: str, *fragments: str) -> list[OutputEvent]:
    more = [ToolCallDelta(number, fragment) for fragment in fragments]
    return [ToolCallStart(number, name, f"call_{number}"), *more, ToolCallEnd(number)]


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_events_of_every_kind_of_item() -> None:
    events = streamed(
        [
            ReasoningDelta("hm"),
            TextDelta("I ", 0),
            TextDelta("add.", 2),
            *call(0, "add", '{"a"', ":1}"),
            *call(1, "agents__close", "{}"),
            *call(2, "patch", '{"input": "diff', '\\n"}'),
        ]
    )
    assert types(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done"),
        *("output_item.done", "completed"),
    ]
    reasoning, message, add, close, patch = events[-1]["response"]["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"] == [{"type": "output_text", "text": "I add.", "annotations": []}]
    assert (add["call_id"], add["name"], add["arguments"]) == ("call_0", "add", '{"a":1}')
    assert "namespace" not in add
    assert (close["name"], close["namespace"], close["arguments"]) == ("close", "agents", "{}")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "diff\n")


def test_reasoning_as_a_summary() -> None:
    """It stands where clients look for what they show, and nowhere else."""
    events = streamed(
        [ReasoningDelta("h"), ReasoningDelta("m"), TextDelta("a", 0)], summarized=True
    )
    assert types(events)[2:9] == [
        *("output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
    ]
    reasoning = events[-1]["response"]["output"][0]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "content" not in reasoning


def test_encrypted_reasoning() -> None:
    for summarized in (False, True):
        events = streamed([ReasoningDelta("hm")], summarized=summarized, encrypted=True)
        reasoning = events[-1]["response"]["output"][0]
        assert hidden_in(reasoning["encrypted_content"]) == "hm"
        assert events[2]["item"]["encrypted_content"] is None


def test_cut_answer_is_incomplete() -> None:
    """So is its last item, and only that."""
    events = streamed([TextDelta("a", 0), *call(0, "add", '{"a"')[:-1]], FinishReason.LENGTH)
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


@pytest.mark.parametrize("events", [[], [ReasoningDelta("hm")]])
def test_answer_without_words_has_an_empty_text(events: list[OutputEvent]) -> None:
    """A client that looks for a message finds one."""
    last = streamed(events)[-1]["response"]
    assert last["output"][-1]["content"] == [{"type": "output_text", "text": "", "annotations": []}]
    assert last["status"] == "completed"
    assert len(streamed(events, FinishReason.LENGTH)[-1]["response"]["output"]) == len(events)


def test_failure_keeps_the_items_before_it() -> None:
    answers = encoder(FinishReason.ERROR)
    error = APIError(400, "too long", code="context_length_exceeded")
    stream = (
        answers.opening() + answers.deltas(0, [Delta(TextDelta("a", 0))]) + answers.failure(error)
    )
    last = read(stream)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "context_length_exceeded", "message": "too long"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert last["response"]["output"][0]["content"][0]["text"] == "a"


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (429, "rate_limit_exceeded"),
        (503, "rate_limit_exceeded"),
        (500, "server_error"),
        (504, "server_error"),
        (400, "invalid_prompt"),
    ],
)
def test_errors_have_codes_that_clients_know(status: int, code: str) -> None:
    (event,) = read(encoder(FinishReason.ERROR).failure(APIError(status, "words")))
    assert event["response"]["error"] == {"code": code, "message": "words"}
    STRICT.validate_python(event)


def test_cancelled_answer() -> None:
    """Its last event is one that clients know; its status says more."""
    last = streamed([TextDelta("a", 0)], FinishReason.CANCELLED)[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "cancelled"
    assert last["response"]["incomplete_details"] is None


def test_keepalives_are_events_with_numbers() -> None:
    """Codex does not count comments."""
    answers = encoder()
    events = read(answers.opening() + answers.keepalive() + answers.keepalive())
    assert types(events) == ["created", "in_progress", "in_progress", "in_progress"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]


def test_each_token_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The events at the end, and an answer that is not streamed, reuse the bytes."""
    encoded, encode = [], response_output._logprob

    def counted(token: TokenLogProb) -> dict[str, Any]:
        encoded.append(token)
        return encode(token)

    monkeypatch.setattr(response_output, "_logprob", counted)
    answers = encoder(logprobs=True)
    told = [Told(0, TokenLogProb(str(each), -1.0, (97,), ())) for each in range(5)]
    for one in told:
        answers.deltas(0, [Delta(TextDelta("a", 0), [one])])
    (item,) = read(answers.ended(0) + answers.closing())[-1]["response"]["output"]
    assert [each["token"] for each in item["content"][0]["logprobs"]] == list("01234")
    assert encoded == [each.token for each in told]
    assert isinstance(answers.whole()["output"][0]["content"][0]["logprobs"], Raw)


def test_logprobs_come_with_their_text() -> None:
    """A special token, which writes nothing, has an empty list of bytes."""
    answers = encoder(logprobs=True)
    likely = TopLogProb("<|end|>", -2.0, None)
    told = [Told(0, TokenLogProb("a", -1.0, (97,), (likely,)))]
    stream = (
        answers.deltas(0, [Delta(TextDelta("a", 0), told)]) + answers.ended(0) + answers.closing()
    )
    events = read(stream)
    expected = {
        "token": "a",
        "logprob": -1.0,
        "bytes": [97],
        "top_logprobs": [{"token": "<|end|>", "logprob": -2.0, "bytes": []}],
    }
    assert events[2]["logprobs"] == [expected]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == [expected]
    for event in events:
        STRICT.validate_python(event)


@pytest.mark.parametrize(
    "arguments", ["", "no JSON", '"input"', '{"input": 1}', '{"input": "a", "b": 1}', '{"inp']
)
def test_malformed_custom_call_is_kept(arguments: str) -> None:
    fragments = [arguments] if arguments else []
    last = streamed(call(0, "patch", *fragments))[-1]["response"]
    assert last["output"][0]["input"] == arguments


def test_unknown_tool_is_a_function() -> None:
    last = streamed(call(0, "unknown", "{}"))[-1]["response"]
    assert last["output"][0]["name"] == "unknown"
    assert last["output"][0]["type"] == "function_call"


def test_object_has_all_fields_of_the_sdk() -> None:
    last = streamed([TextDelta("a", 0)])[-1]["response"]
    response = Response.model_validate(last)
    assert response.output_text == "a"
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    assert response.usage.total_tokens == 16
    assert response.max_output_tokens == 5
    assert len(response.tools) == 3


TEXT = st.text('ab \n"\\é👩', min_size=1, max_size=4)


@st.composite
def answers_in_parts(draw: st.DrawFn) -> list[OutputEvent]:
    events: list[OutputEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=8)):
        if kind == "text":
            events.append(TextDelta(draw(TEXT), 0))
        elif kind == "reasoning":
            events.append(ReasoningDelta(draw(TEXT)))
        else:
            fragments = draw(st.lists(TEXT, max_size=3))
            events += call(calls, draw(st.sampled_from([*CALLED, "other"])), *fragments)
            calls += 1
    cut = draw(st.integers(0, 2))
    return events[: len(events) - cut]


@given(answers_in_parts(), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]), st.booleans())
def test_any_answer_makes_a_stream_in_order(
    events: list[OutputEvent],
    reason: FinishReason,
    summarized: bool,  # noqa: FBT001  (hypothesis gives it)
) -> None:
    """Events are numbered, balanced and allowed; the response repeats the deltas."""
    stream = streamed(events, reason, summarized=summarized, encrypted=summarized)
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert types(stream)[:2] == ["created", "in_progress"]
    for event in stream:
        STRICT.validate_python(event)
    last = stream[-1]["response"]
    assert _followed(stream[2:-1]) == last["output"]
    said = [event.text for event in events if isinstance(event, TextDelta)]
    texts = [i["content"][0]["text"] for i in last["output"] if i["type"] == "message"]
    assert "".join(said) == "".join(texts)
    called = [event.call for event in events if isinstance(event, ToolCallStart)]
    assert len(called) == sum(item["type"].endswith("_call") for item in last["output"])


def _followed(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Follow a stream as a strict client would; return its items."""
    items: list[dict[str, Any]] = []
    open_item: dict[str, Any] | None = None
    said = ""
    part_open = False
    for event in stream:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items)
        if kind == "output_item.added":
            assert open_item is None
            open_item, said = event["item"], ""
            continue
        assert open_item is not None
        if kind == "output_item.done":
            assert not part_open
            assert event["item"]["id"] == open_item["id"]
            assert event["item"]["type"] == open_item["type"]
            items.append(event["item"])
            open_item = None
            continue
        assert event["item_id"] == open_item["id"]
        if kind.startswith(("content_part", "reasoning_summary_part")):
            assert part_open == kind.endswith("done")
            part_open = not part_open
            assert event["part"]["text"] == said
        elif kind.endswith("delta"):
            said += event["delta"]
        else:
            assert said in (event.get("text"), event.get("arguments"), event.get("input"))
    assert open_item is None
    return items


@given(answers_in_parts(), st.booleans())
def test_sdk_puts_any_answer_together(
    events: list[OutputEvent],
    summarized: bool,  # noqa: FBT001  (hypothesis gives it)
) -> None:
    state: ResponseStreamState[Any] = _state()
    final = None
    for event in streamed(events, summarized=summarized):
        made = construct_type_unchecked(type_=cast("Any", ResponseStreamEvent), value=event)
        for fired in state.handle_event(cast("ResponseStreamEvent", made)):
            final = fired
    assert final is not None
    assert final.type == "response.completed"
    assert len(final.response.output) == len(state._output_items)


def _state() -> ResponseStreamState[Any]:
    return ResponseStreamState(input_tools=omit, text_format=omit)


def test_whole_answer_has_the_same_items() -> None:
    deltas = [Delta(e) for e in [ReasoningDelta("r"), TextDelta("t", 0), *call(0, "add", "{}")]]
    answers = encoder()
    answers.take(deltas)
    whole = answers.whole()
    last = streamed([delta.event for delta in deltas])[-1]["response"]
    assert _nameless(whole["output"]) == _nameless(last["output"])
    assert answers.whole() is whole


def _nameless(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key != "id"} for item in items]


async def test_end_waits_for_its_work() -> None:
    """A cancelled wait does not cancel the work, nor does it happen twice."""
    done: list[str] = []
    release = asyncio.Event()

    async def at_end() -> None:
        await release.wait()
        done.append("stored")

    generations = Generations([])
    generations.at_end.append(at_end)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await generations.next()
    release.set()
    assert await generations.next() is None
    assert await generations.next() is None
    assert done == ["stored"]
