"""OpenAI's own client, chat completions: tools and structured output, over the Unix socket."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from pydantic import BaseModel, ConfigDict

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
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": PARAMETERS,
    },
}


class Choice(BaseModel):
    """A type whose values can be counted."""

    model_config = ConfigDict(extra="forbid")

    answer: Literal["yes", "no"]
    certain: bool


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


def user(text: str) -> list[ChatCompletionMessageParam]:
    """Make a conversation of one message."""
    return [{"role": "user", "content": text}]


def with_results(
    messages: list[ChatCompletionMessageParam], answer: ChatCompletion
) -> list[ChatCompletionMessageParam]:
    """Append an answer, as the client would send it, and what its tool calls return."""
    message = answer.choices[0].message
    turns = [*messages, message.to_dict()]
    for call in message.tool_calls or []:
        assert call.type == "function"
        content = get_weather(**json.loads(call.function.arguments))
        turns.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return turns  # type: ignore[return-value]  # an answer's message is a request's


def test_tools(client: openai.OpenAI) -> None:
    """A call and its result make their way; the second turn finds the first one cached."""
    messages = user(TOOLS)
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    assert first.choices[0].finish_reason == "tool_calls"
    assert not first.choices[0].message.content
    assert len(first.choices[0].message.tool_calls or []) == 1
    messages = with_results(messages, first)
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == USED
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason == "stop"
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens


def test_streamed_calls(client: openai.OpenAI) -> None:
    """Two calls in one answer: each names itself once, and then brings its arguments."""
    calls: dict[int, dict[str, str]] = {}
    finish = None
    for chunk in client.chat.completions.create(
        model=MODEL, messages=user(TWO_CALLS), tools=[TOOL], stream=True
    ):
        finish = chunk.choices[0].finish_reason or finish
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.function is not None
            if delta.index not in calls:
                assert delta.id
                assert delta.function.name == "get_weather"
                calls[delta.index] = {"id": delta.id, "arguments": ""}
            else:
                assert delta.id is None
                assert delta.function.name is None
            calls[delta.index]["arguments"] += delta.function.arguments or ""
    assert finish == "tool_calls"
    assert list(calls) == [0, 1]
    assert calls[0]["id"] != calls[1]["id"]
    cities = [json.loads(call["arguments"]) for call in calls.values()]
    assert cities == [{"city": "Paris"}, {"city": "Łódź"}]


async def test_tools_by_the_async_helper(aclient: openai.AsyncOpenAI) -> None:
    """The client's own collector of streams makes whole messages of them, turn after turn."""
    messages = user(TWO_CALLS)
    answers: list[str] = []
    for _ in range(2):
        async with aclient.chat.completions.stream(
            model=MODEL, messages=messages, tools=[TOOL]
        ) as stream:
            events = [event.type async for event in stream]
            answer = await stream.get_final_completion()
        answers.append(answer.choices[0].message.content or "")
        messages = with_results(messages, answer)
        if len(answers) == 1:
            assert events.count("tool_calls.function.arguments.done") == 2
    assert answers == ["", USED_TWICE]


async def test_async_chat(aclient: openai.AsyncOpenAI) -> None:
    """Whole and in pieces, the answer is the same."""
    whole = await aclient.chat.completions.create(model=MODEL, messages=user(CHAT))
    stream = await aclient.chat.completions.create(model=MODEL, messages=user(CHAT), stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert whole.choices[0].message.content == "".join(pieces) == SAID
    assert len(pieces) > 3


def test_a_tool_that_must_be_called(client: openai.OpenAI) -> None:
    """A named tool is called, and its arguments are of its schema, whatever the model prefers."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=user(plan("I would rather talk.")),
        tools=[
            {"type": "function", "function": {"name": "other"}},
            {
                "type": "function",
                "function": {"name": "decide", "parameters": Choice.model_json_schema()},
            },
        ],
        tool_choice={"type": "function", "function": {"name": "decide"}},
        parallel_tool_calls=False,  # a model that is held to calls alone would make more
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "decide"
    assert isinstance(Choice.model_validate_json(call.function.arguments), Choice)


def test_no_tool_may_be_called(client: openai.OpenAI) -> None:
    """With `tool_choice` none the answer is text."""
    answer = client.chat.completions.create(
        model=MODEL, messages=user(CHAT), tools=[TOOL], tool_choice="none"
    )
    assert answer.choices[0].message.content == SAID
    assert answer.choices[0].message.tool_calls is None


def test_parsed_tools(client: openai.OpenAI) -> None:
    """The client parses a strict tool's arguments into its type."""
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=user(TOOLS.replace("get_weather", "Choice")),
        tools=[openai.pydantic_function_tool(Choice)],
        tool_choice="required",
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Choice)


def test_structured(client: openai.OpenAI) -> None:
    """The client's type comes back, whole and streamed."""
    answer = client.chat.completions.parse(
        model=MODEL, messages=user(STRUCTURED), response_format=Weather
    )
    assert answer.choices[0].message.parsed == WEATHER
    with client.chat.completions.stream(
        model=MODEL, messages=user(STRUCTURED), response_format=Weather
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == WEATHER


async def test_structured_whatever_the_model_prefers(aclient: openai.AsyncOpenAI) -> None:
    """A model that would answer in prose answers in JSON of the schema."""
    answer = await aclient.chat.completions.parse(
        model=MODEL, messages=user(plan("Well, yes and no.")), response_format=Choice
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Choice)
