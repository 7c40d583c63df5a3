"""OpenAI's own client and `/v1/responses`, over the Unix socket."""

import asyncio
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from ..daemon.running import RunningDaemon
from .test_openai import async_client, sync_client

QUESTION = "What is the capital of France?"


def test_sync_answer(smollm2_daemon: RunningDaemon) -> None:
    """A whole answer, with its usage."""
    with sync_client(smollm2_daemon) as client:
        answer = client.responses.create(
            model="smollm2", input=QUESTION, temperature=0, max_output_tokens=16
        )
    assert "Paris" in answer.output_text
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    Response.model_validate(answer.model_dump())


def test_sync_stream(smollm2_daemon: RunningDaemon) -> None:
    """The client's accumulator ends with the response that a whole answer is."""
    with sync_client(smollm2_daemon) as client:
        with client.responses.stream(
            model="smollm2", input=QUESTION, temperature=0, max_output_tokens=16
        ) as stream:
            events = list(stream)
            final = stream.get_final_response()
        stored = client.responses.retrieve(final.id)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text
    assert "Paris" in final.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert stored.output_text == final.output_text
    assert stored.usage == final.usage


def test_a_conversation_goes_on(smollm2_daemon: RunningDaemon) -> None:
    """By the id of the response before, with what was computed for it."""
    with sync_client(smollm2_daemon) as client:
        first = client.responses.create(
            model="smollm2",
            input=QUESTION,
            temperature=0,
            max_output_tokens=16,
        )
        second = client.responses.create(
            model="smollm2",
            input="What is the capital of Japan?",
            previous_response_id=first.id,
            temperature=0,
            max_output_tokens=16,
        )
        items = list(client.responses.input_items.list(second.id))
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.create(model="smollm2", input="x", previous_response_id=first.id)
    assert "Tokyo" in second.output_text
    assert first.usage is not None
    assert second.usage is not None
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens
    assert [item.type for item in items] == ["message"]
    assert missing.value.code == "previous_response_not_found"


async def test_async_answer_and_stream(smollm2_daemon: RunningDaemon) -> None:
    """The asynchronous client, whole and streamed, both at once."""

    async def streamed(client: openai.AsyncOpenAI) -> str:
        async with client.responses.stream(
            model="smollm2", input=QUESTION, temperature=0, max_output_tokens=16
        ) as stream:
            return (await stream.get_final_response()).output_text

    async with async_client(smollm2_daemon) as client:
        whole, text = await asyncio.gather(
            client.responses.create(
                model="smollm2", input=QUESTION, temperature=0, max_output_tokens=16
            ),
            streamed(client),
        )
    assert whole.output_text == text
    assert "Paris" in text


async def test_cancel(tiny_daemon: RunningDaemon) -> None:
    """A running answer ends; one that has ended cannot be cancelled."""
    async with async_client(tiny_daemon) as client:
        stream = await client.responses.create(
            model="tiny", input="hello", temperature=0, max_output_tokens=6000, stream=True
        )
        events: list[ResponseStreamEvent] = []
        found = None
        async for event in stream:
            if event.type == "response.output_text.delta" and found is None:
                found = await client.responses.cancel(_id(events))
                assert found.status == "cancelled"
            events.append(event)
        last = events[-1]
        assert last.type == "response.incomplete"
        assert last.response.status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="only one that is being made"):
            await client.responses.cancel(_id(events))


def _id(events: list[ResponseStreamEvent]) -> str:
    first = events[0]
    assert first.type == "response.created"
    return first.response.id


def test_count(tiny_daemon: RunningDaemon) -> None:
    """As many tokens as an answer reads."""
    with sync_client(tiny_daemon) as client:
        counted = client.responses.input_tokens.count(model="tiny", input="hello")
        answer = client.responses.create(model="tiny", input="hello", max_output_tokens=1)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


def test_tools_are_sent_and_items_come_back(tiny_daemon: RunningDaemon) -> None:
    """The client's own output items are input again, with the outputs of their calls."""
    tool: Any = {
        "type": "function",
        "name": "add",
        "parameters": {"type": "object", "properties": {}},
        "strict": False,
    }
    call: Any = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    output: Any = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    with sync_client(tiny_daemon) as client:
        first = client.responses.create(model="tiny", input="hi", max_output_tokens=4, tools=[tool])
        said: Any = [item.model_dump(exclude_unset=True) for item in first.output]
        second = client.responses.create(
            model="tiny",
            input=[{"role": "user", "content": "hi"}, *said, call, output],
            max_output_tokens=4,
            tools=[tool],
        )
    assert [given.type for given in second.tools] == ["function"]
    assert second.output_text


def test_errors_are_the_clients_own(tiny_daemon: RunningDaemon) -> None:
    """Refusals arrive as typed exceptions, with the field at fault, streamed or not."""
    with sync_client(tiny_daemon) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="background") as refused:
                client.responses.create(model="tiny", input="hi", background=True, stream=stream)
            assert refused.value.param == "background"
            with pytest.raises(openai.BadRequestError) as long:
                client.responses.create(model="tiny", input="word " * 90_000, stream=stream)
            assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError, match="this daemon serves 'tiny'"):
            client.responses.create(model="gpt-99", input="hi")
