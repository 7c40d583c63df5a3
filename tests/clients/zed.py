"""Zed's requests to an OpenAI-compatible provider, and its needs of the answers.

Zed has a window and does not run here. What stands here are facts of its public source in 2026: of
its crates `language_models`, `open_ai` and `language_model_core`. Versions differ in what they need
of a chunk; what any of them needs is needed here.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from ..daemon.running import RunningDaemon
from .zed_settings import Settings

_STOPS = {"stop": "end of turn", "length": "most tokens", "tool_calls": "calls"}


class FunctionChunk(msgspec.Struct):
    """More of a call."""

    name: str | None = None
    arguments: str | None = None


class CallChunk(msgspec.Struct):
    """More of a call, and whose."""

    index: int
    id: str | None = None
    function: FunctionChunk | None = None


class Delta(msgspec.Struct):
    """More of an answer. The newest version takes thinking from both fields, one after another."""

    role: Literal["user", "assistant", "system", "tool"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallChunk] | None = None


class ChunkChoice(msgspec.Struct):
    """One of `choices`; only the first is read."""

    index: int
    delta: Delta | None = None
    finish_reason: str | None = None


class PromptTokens(msgspec.Struct):
    """How much of a prompt was cached."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Usage of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens | None = None


class Failure(msgspec.Struct):
    """The error's text."""

    message: str


class Chunk(msgspec.Struct):
    """A line of a stream: an `error`, or else an event, which has `choices`."""

    choices: list[ChunkChoice] | None = None
    usage: Usage | None = None
    error: Failure | None = None


class StreamError(Exception):
    """A stream says that it failed."""


@dataclass
class RejectionError(Exception):
    """An answer with another status than 200.

    Attributes:
        status: of it.
        body: its text; Zed looks in it for signs that the prompt is too long.
        retry_after: seconds; Zed reads whole ones only.
    """

    status: int
    body: str
    retry_after: int | None

    @property
    def prompt_too_large(self) -> bool:
        """Return True if Zed offers to begin a new thread."""
        return "context_length_exceeded" in self.body or "exceeds the context window" in self.body


@dataclass
class Answer:
    """A stream, as Zed reads it.

    Attributes:
        text: that it shows.
        thinking: that it shows apart.
        calls: that it carries out, as the arguments of `assistant` have them.
        stop: why it ended; None where the stream did not say.
        usage: what it took.
    """

    text: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    stop: str | None = None
    usage: Usage | None = None


def read(lines: Iterable[bytes]) -> Answer:
    """Read a stream as Zed does.

    Raises:
        StreamError: a line has an error.
        msgspec.ValidationError: a line is not what Zed takes.
    """
    answer, calls = Answer(), dict[int, dict[str, Any]]()
    for chunk in _chunks(lines):
        answer.usage = chunk.usage or answer.usage
        for choice in (chunk.choices or [])[:1]:
            delta = choice.delta or Delta()
            answer.text += delta.content or ""
            answer.thinking += (delta.reasoning or "") + (delta.reasoning_content or "")
            for more in delta.tool_calls or []:
                _take(calls.setdefault(more.index, {"id": "", "name": "", "arguments": ""}), more)
            if choice.finish_reason is not None:
                answer.stop = _STOPS[choice.finish_reason]
            if choice.finish_reason == "tool_calls":  # else they are not carried out
                answer.calls = [_parsed(call) for call in calls.values()]
    return answer


def _chunks(lines: Iterable[bytes]) -> Iterator[Chunk]:
    for line in lines:
        data = line.rstrip(b"\r\n").removeprefix(b"data:").removeprefix(b" ")
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        chunk = msgspec.json.decode(data, type=Chunk)
        if chunk.error is not None:
            raise StreamError(chunk.error.message)
        if chunk.choices is None:
            raise msgspec.ValidationError(f"neither an event nor an error: {data!r}")
        yield chunk


def _take(call: dict[str, Any], more: CallChunk) -> None:
    function = more.function or FunctionChunk()
    call["id"] = more.id or call["id"]
    call["name"] = function.name or call["name"]
    call["arguments"] += function.arguments or ""


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    assert call["id"]
    assert call["name"]
    return {**call, "arguments": json.loads(call["arguments"] or "{}")}


def content(*texts: str) -> str | list[dict[str, str]]:
    """Write the content of a message: a string where there is just one text."""
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def assistant(answer: Answer, *, interleaved: bool) -> dict[str, Any]:
    """Write an answer into the history, its calls' arguments as short as JSON can be.

    Args:
        answer: to write.
        interleaved: whether thinking goes into a field of its own, and not before the text.
    """
    texts = [answer.text] if interleaved else [answer.thinking, answer.text]
    texts = [text for text in texts if text]
    message: dict[str, Any] = {"role": "assistant", "content": content(*texts) if texts else None}
    if answer.calls:
        message["tool_calls"] = [_written(call) for call in answer.calls]
    if interleaved and answer.thinking:
        message["reasoning_content"] = answer.thinking
    return message


def _written(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["arguments"], separators=(",", ":"), ensure_ascii=False)
    function = {"name": call["name"], "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}


def result(call: dict[str, Any], *texts: str) -> dict[str, Any]:
    """Write what a call returned: nothing is an empty list."""
    return {"role": "tool", "content": content(*texts), "tool_call_id": call["id"]}


class Zed:
    """Sends requests as Zed's agent, its inline assistant and its titles do.

    Args:
        settings: the text of `settings.json`, without comments.
    """

    def __init__(self, settings: str) -> None:
        whole = msgspec.json.decode(settings, type=Settings)
        chosen = whole.agent.default_model
        self.providers = whole.language_models.openai_compatible
        self.provider = self.providers[chosen.provider]
        (self.model,) = (m for m in self.provider.available_models if m.name == chosen.model)
        self.able = self.model.capabilities

    def body(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        tool_choice: Literal["auto", "required", "none"] | None = None,
        thread: str | None = None,
    ) -> dict[str, Any]:
        """Write a request."""
        most = "max_tokens" if self.able.max_tokens_parameter else "max_completion_tokens"
        optional = {
            most: self.model.max_output_tokens,
            "tool_choice": tool_choice,
            "parallel_tool_calls": (self.able.parallel_tool_calls and bool(tools)) or None,
            "tools": [{"type": "function", "function": tool} for tool in tools] or None,
            "prompt_cache_key": thread if self.able.prompt_cache_key else None,
            "reasoning_effort": self.model.reasoning_effort,
        }
        return {
            "model": self.model.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 1.0,
            **{name: value for name, value in optional.items() if value is not None},
        }

    def ask(self, daemon: RunningDaemon, body: dict[str, Any]) -> Answer:
        """Send a request, over the socket: the daemon's TCP port is in a network of its own.

        Raises:
            RejectionError: it was refused.
        """
        route = urlsplit(f"{self.provider.api_url}/chat/completions").path
        headers = {"Content-Type": "application/json", "Authorization": "Bearer unused"}
        connection = daemon.connection()
        try:
            connection.request("POST", route, msgspec.json.encode(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response)
            return read(response)
        finally:
            connection.close()


def _refused(response: HTTPResponse) -> RejectionError:
    after = response.headers.get("Retry-After")
    seconds = int(after) if after is not None else None
    return RejectionError(response.status, response.read().decode(), seconds)
