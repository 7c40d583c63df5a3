"""OpenAI's own client, responses: tools, state and structured output, over the Unix socket."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from ..daemon.running import RunningDaemon
from .outside import MODEL
from .scripted import plan
from .tasks import (
    CHAT,
    PARAMETERS,
    SAID,
    STRUCTURED,
    TOOLS,
    TWO_CALLS,
    USED,
    USED_TWICE,
    WEATHER,
    Weather,
    get_weather,
)
from .test_openai import async_client, sync_client

TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tell the weather of a city.",
    "parameters": PARAMETERS,
    "strict": True,
}


@pytest.fixture
def client(scripted_daemon: RunningDaemon) -> Iterator[openai.OpenAI]:
    """A client of the scripted daemon."""
    with sync_client(scripted_daemon) as client:
        yield client


@pytest.fixture
async def aclient(scripted_daemon: RunningDaemon) -> AsyncIterator[openai.AsyncOpenAI]:
    """The same, asynchronous."""
    async with async_client(scripted_daemon) as client:
        yield client


def results(response: Response) -> list[Any]:
    """Make the items that return what an answer's calls return."""
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": get_weather(**json.loads(item.arguments)),
        }
        for item in response.output
        if item.type == "function_call"
    ]


def test_answer_is_kept(client: openai.OpenAI) -> None:
    """An answer can be read again until it is deleted."""
    answer = client.responses.create(model=MODEL, input=CHAT)
    assert (answer.output_text, answer.status) == (SAID, "completed")
    assert client.responses.retrieve(answer.id).output_text == SAID
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_tools_by_previous_response(client: openai.OpenAI) -> None:
    """The next turn names the last one and brings the result; the rest is known."""
    first = client.responses.create(model=MODEL, input=TOOLS, tools=[TOOL])
    assert [item.type for item in first.output] == ["function_call"]
    second = client.responses.create(
        model=MODEL, input=results(first), tools=[TOOL], previous_response_id=first.id
    )
    assert second.output_text == USED
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_tools_by_items(client: openai.OpenAI) -> None:
    """Nothing is kept: the client sends its items back, two calls and their results among them."""
    items: list[Any] = [{"role": "user", "content": TWO_CALLS}]
    first = client.responses.create(model=MODEL, input=items, tools=[TOOL], store=False)
    assert len(results(first)) == 2
    items += [*[item.to_dict() for item in first.output], *results(first)]
    second = client.responses.create(model=MODEL, input=items, tools=[TOOL], store=False)
    assert second.output_text == USED_TWICE
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_stream(client: openai.OpenAI) -> None:
    """Events come in their order, numbered, and the last one has the whole answer."""
    events = list(client.responses.create(model=MODEL, input=CHAT, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == SAID
    assert len(deltas) > 1
    assert list(dict.fromkeys(kinds)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == SAID


async def test_streamed_tools(aclient: openai.AsyncOpenAI) -> None:
    """The client's own collector of events finds the call and its arguments."""
    async with aclient.responses.stream(model=MODEL, input=TOOLS, tools=[TOOL]) as stream:
        kinds = [event.type async for event in stream]
        first = await stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert "response.function_call_arguments.done" in kinds
    async with aclient.responses.stream(
        model=MODEL, input=results(first), tools=[TOOL], previous_response_id=first.id
    ) as stream:
        second = await stream.get_final_response()
    assert second.output_text == USED


async def test_structured(aclient: openai.AsyncOpenAI) -> None:
    """The client's type comes back."""
    answer = await aclient.responses.parse(model=MODEL, input=STRUCTURED, text_format=Weather)
    assert answer.output_parsed == WEATHER


def test_count(client: openai.OpenAI) -> None:
    """Tokens are counted as they are for an answer."""
    counted = client.responses.input_tokens.count(model=MODEL, input=TOOLS, tools=[TOOL])
    answer = client.responses.create(model=MODEL, input=TOOLS, tools=[TOOL], store=False)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


def test_thoughts_as_a_summary(thinking_daemon: RunningDaemon) -> None:
    """Clients show it; what they keep without reading it carries the thoughts, too."""
    asked: dict[str, Any] = {
        "model": "default",
        "input": plan("Two and two.\n</think>\n\nFour."),
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    with sync_client(thinking_daemon) as client:
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
        whole = client.responses.create(**asked)
    deltas = [e.delta for e in events if e.type == "response.reasoning_summary_text.delta"]
    for answer in (streamed, whole):
        reasoning: Any = answer.output[0]
        assert reasoning.type == "reasoning"
        assert reasoning.summary[0].text == "".join(deltas)
        assert reasoning.summary[0].text.strip() == "Two and two."
        assert reasoning.encrypted_content
        assert answer.output_text.strip() == "Four."
        assert answer.reasoning is not None
        assert answer.reasoning.summary == "auto"
