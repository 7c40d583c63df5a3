"""Anthropic's own client, over the Unix socket."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import beta_async_tool, beta_tool
from anthropic.types import Message, MessageParam

from ..daemon.running import RunningDaemon
from .outside import MODEL
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

TOOL: Any = {
    "name": "get_weather",
    "description": "Tell the weather of a city.",
    "input_schema": PARAMETERS,
}
LIMIT = 200


@pytest.fixture
def client(scripted_daemon: RunningDaemon) -> Iterator[anthropic.Anthropic]:
    """A client of the scripted daemon."""
    transport = httpx2.HTTPTransport(uds=str(scripted_daemon.socket))
    with anthropic.Anthropic(
        base_url="http://localhost",
        api_key="unused",
        max_retries=0,
        http_client=anthropic.DefaultHttpxClient(transport=transport),
    ) as client:
        yield client


@pytest.fixture
async def aclient(scripted_daemon: RunningDaemon) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The same, asynchronous."""
    transport = httpx2.AsyncHTTPTransport(uds=str(scripted_daemon.socket))
    async with anthropic.AsyncAnthropic(
        base_url="http://localhost",
        api_key="unused",
        max_retries=0,
        http_client=anthropic.DefaultAsyncHttpxClient(transport=transport),
    ) as client:
        yield client


def user(text: str) -> list[MessageParam]:
    """Make a conversation of one message."""
    return [{"role": "user", "content": text}]


def with_results(messages: list[MessageParam], answer: Message) -> list[MessageParam]:
    """Append an answer, as the client would send it, and what its tool calls return."""
    found: list[Any] = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": get_weather(str(block.input["city"])),
        }
        for block in answer.content
        if block.type == "tool_use"
    ]
    content: Any = [block.to_dict() for block in answer.content]
    return [
        *messages,
        {"role": "assistant", "content": content},
        {"role": "user", "content": found},
    ]


def test_answer(client: anthropic.Anthropic) -> None:
    """The answer, why it ended, and what was cached of its prompt the second time."""
    system: Any = [
        {
            "type": "text",
            "text": "You are one of many agents. " * 10,
            "cache_control": {"type": "ephemeral"},
        }
    ]
    answers = [
        client.messages.create(model=MODEL, max_tokens=LIMIT, messages=user(CHAT), system=system)
        for _ in range(2)
    ]
    for answer in answers:
        (block,) = answer.content
        assert block.type == "text"
        assert (block.text, answer.stop_reason) == (SAID, "end_turn")
    first, second = (answer.usage for answer in answers)
    assert second.cache_read_input_tokens
    assert second.input_tokens < first.input_tokens + (first.cache_read_input_tokens or 0)


def test_stream(client: anthropic.Anthropic) -> None:
    """Events come in their order; text comes in pieces."""
    with client.messages.stream(model=MODEL, max_tokens=LIMIT, messages=user(CHAT)) as stream:
        pieces = list(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens > 1
    assert "".join(pieces) == SAID
    assert len(pieces) > 1
    events = client.messages.create(model=MODEL, max_tokens=LIMIT, messages=user(CHAT), stream=True)
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_tools(client: anthropic.Anthropic) -> None:
    """Two calls in one answer; their results go back in one message."""
    messages = user(TWO_CALLS)
    first = client.messages.create(model=MODEL, max_tokens=LIMIT, messages=messages, tools=[TOOL])
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["tool_use", "tool_use"]
    second = client.messages.create(
        model=MODEL, max_tokens=LIMIT, messages=with_results(messages, first), tools=[TOOL]
    )
    (block,) = second.content
    assert block.type == "text"
    assert block.text == USED_TWICE


async def test_streamed_tools(aclient: anthropic.AsyncAnthropic) -> None:
    """The input of a call that must be made comes in pieces, and is whole at its end."""
    messages = user(TOOLS)
    async with aclient.messages.stream(
        model=MODEL,
        max_tokens=LIMIT,
        messages=messages,
        tools=[TOOL],
        tool_choice={"type": "any"},
    ) as stream:
        pieces = [event.partial_json async for event in stream if event.type == "input_json"]
        first = await stream.get_final_message()
    (block,) = first.content
    assert block.type == "tool_use"
    assert block.input == {"city": "Paris"}
    assert len(pieces) > 1
    async with aclient.messages.stream(
        model=MODEL, max_tokens=LIMIT, messages=with_results(messages, first), tools=[TOOL]
    ) as stream:
        assert await stream.get_final_text() == USED


def test_tool_runner(client: anthropic.Anthropic) -> None:
    """The client's own loop over tools comes to its end."""
    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=LIMIT,
        messages=[{"role": "user", "content": TOOLS}],
        tools=[beta_tool(get_weather)],
    )
    (block,) = runner.until_done().content
    assert block.type == "text"
    assert block.text == USED


async def test_async_tool_runner(aclient: anthropic.AsyncAnthropic) -> None:
    """Likewise with streams and an asynchronous tool."""

    @beta_async_tool(name="get_weather", description="Tell the weather of a city.")
    async def tool(city: str) -> str:
        return get_weather(city)

    runner = aclient.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=LIMIT,
        messages=[{"role": "user", "content": TOOLS}],
        tools=[tool],
        stream=True,
    )
    texts = [await stream.get_final_message() async for stream in runner]
    (block,) = texts[-1].content
    assert block.type == "text"
    assert block.text == USED


def test_structured(client: anthropic.Anthropic) -> None:
    """The client's type comes back."""
    answer = client.messages.parse(
        model=MODEL, max_tokens=LIMIT, messages=user(STRUCTURED), output_format=Weather
    )
    assert answer.parsed_output == WEATHER


async def test_count(aclient: anthropic.AsyncAnthropic) -> None:
    """Tokens are counted as they are for an answer, cached or not."""
    counted = await aclient.messages.count_tokens(
        model=MODEL, messages=user(TOOLS), tools=[TOOL], system="Be brief."
    )
    answer = await aclient.messages.create(
        model=MODEL, max_tokens=LIMIT, messages=user(TOOLS), tools=[TOOL], system="Be brief."
    )
    usage = answer.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached


def test_models(client: anthropic.Anthropic) -> None:
    """The list of models, and one of them."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).type == "model"


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    """Refusals arrive as the client's typed exceptions, with the message to act on."""
    with pytest.raises(anthropic.NotFoundError, match="this daemon serves 'scripted'"):
        client.messages.create(model="claude-99", max_tokens=LIMIT, messages=user(CHAT))
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+"):
        client.messages.create(model=MODEL, max_tokens=LIMIT, messages=user("word " * 70_000))
