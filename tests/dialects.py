"""One question in each of the three protocols, and their answers read alike, streamed or not."""

import json
from dataclasses import dataclass, field
from typing import Any

from .daemon.running import Reply, RunningDaemon

ROUTES = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
_DONE = {"stop": "stop", "tool_calls": "calls", "length": "length"}
_STOPPED = {"end_turn": "stop", "tool_use": "calls", "max_tokens": "length"}


@dataclass(frozen=True)
class Question:
    """A question, whatever the protocol.

    Attributes:
        prompt: the user's message.
        tools: name, JSON schema of the arguments.
        choice: `auto`, `none`, `required`, or the name of a tool.
        strict: True if the tools are.
        parallel: True if several calls are allowed.
        schema: what the answer's text must match; True for any JSON object.
        thinking: switches thinking on or off; None leaves it to the template.
        max_tokens: of the answer.
    """

    prompt: str
    tools: dict[str, Any] = field(default_factory=dict)
    choice: str = "auto"
    strict: bool = False
    parallel: bool = True
    schema: Any = None
    thinking: bool | None = None
    max_tokens: int = 400


@dataclass
class Heard:
    """An answer, whatever the protocol.

    Attributes:
        thoughts: of the model.
        text: its content.
        calls: names and decoded arguments.
        end: `stop`, `calls` or `length`; empty where a stream has no end.
    """

    thoughts: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    end: str = ""


def ask(daemon: RunningDaemon, dialect: str, asked: Question, *, stream: bool) -> Heard:
    """Ask a question and read the whole answer."""
    body = _BODIES[dialect](asked) | {"model": "default", "temperature": 0, "stream": stream}
    reply = daemon.post(body, ROUTES[dialect])
    assert reply.status == 200, reply.body
    if stream:
        return _STREAMS[dialect](_events(reply))
    return _ANSWERS[dialect](reply.json())


def _functions(asked: Question) -> list[dict[str, Any]]:
    return [
        {"name": name, "parameters": schema, "strict": asked.strict}
        for name, schema in asked.tools.items()
    ]


def _chat(asked: Question) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": asked.prompt}],
        "max_tokens": asked.max_tokens,
        "parallel_tool_calls": asked.parallel,
    }
    if asked.tools:
        body["tools"] = [{"type": "function", "function": f} for f in _functions(asked)]
        body["tool_choice"] = asked.choice
        if asked.choice in asked.tools:
            body["tool_choice"] = {"type": "function", "function": {"name": asked.choice}}
    if asked.schema is True:
        body["response_format"] = {"type": "json_object"}
    elif asked.schema is not None:
        held = {"name": "held", "schema": asked.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": held}
    if asked.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": asked.thinking}
    return body


def _messages(asked: Question) -> dict[str, Any]:
    assert asked.schema is not True, "there is no such format in this protocol"
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": asked.prompt}],
        "max_tokens": asked.max_tokens,
    }
    if asked.tools:
        body["tools"] = [
            {"name": name, "input_schema": schema, "strict": asked.strict}
            for name, schema in asked.tools.items()
        ]
        kind = {"required": "any"}.get(asked.choice, asked.choice)
        choice = {"type": "tool", "name": kind} if kind in asked.tools else {"type": kind}
        if kind != "none":
            choice["disable_parallel_tool_use"] = not asked.parallel  # type: ignore[assignment]
        body["tool_choice"] = choice
    if asked.schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": asked.schema}}
    if asked.thinking is not None:
        body["thinking"] = {"type": "adaptive" if asked.thinking else "disabled"}
    return body


def _responses(asked: Question) -> dict[str, Any]:
    body: dict[str, Any] = {
        "input": asked.prompt,
        "max_output_tokens": asked.max_tokens,
        "parallel_tool_calls": asked.parallel,
        "store": False,
    }
    if asked.tools:
        body["tools"] = [{"type": "function", **f} for f in _functions(asked)]
        named = {"type": "function", "name": asked.choice}
        body["tool_choice"] = named if asked.choice in asked.tools else asked.choice
    if asked.schema is True:
        body["text"] = {"format": {"type": "json_object"}}
    elif asked.schema is not None:
        held = {"type": "json_schema", "name": "held", "schema": asked.schema}
        body["text"] = {"format": held}
    if asked.thinking is not None:
        body["reasoning"] = {"effort": "medium" if asked.thinking else "none"}
    return body


def _events(reply: Reply) -> list[dict[str, Any]]:
    lines = reply.body.decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def _chat_answer(body: dict[str, Any]) -> Heard:
    (choice,) = body["choices"]
    message = choice["message"]
    called = [call["function"] for call in message.get("tool_calls") or []]
    return Heard(
        message.get("reasoning_content") or message.get("reasoning") or "",
        message["content"] or "",
        [(one["name"], json.loads(one["arguments"])) for one in called],
        _DONE[choice["finish_reason"]],
    )


def _chat_stream(events: list[dict[str, Any]]) -> Heard:
    heard, called = Heard(), list[list[str]]()
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            heard.thoughts += delta.get("reasoning_content") or delta.get("reasoning") or ""
            heard.text += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(called):
                    called.append([call["function"]["name"], ""])
                called[call["index"]][1] += call["function"].get("arguments") or ""
            heard.end = _DONE[choice["finish_reason"]] if choice["finish_reason"] else heard.end
    heard.calls = [(name, json.loads(arguments)) for name, arguments in called]
    return heard


def _messages_answer(body: dict[str, Any]) -> Heard:
    heard = Heard(end=_STOPPED[body["stop_reason"]])
    for block in body["content"]:
        match block["type"]:
            case "thinking":
                heard.thoughts += block["thinking"]
            case "text":
                heard.text += block["text"]
            case "tool_use":
                heard.calls.append((block["name"], block["input"]))
    return heard


def _messages_stream(events: list[dict[str, Any]]) -> Heard:
    heard, blocks = Heard(), list[dict[str, Any]]()
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append({"json": "", **event["content_block"]})
            case "content_block_delta":
                delta = event["delta"]
                heard.thoughts += delta.get("thinking", "")
                heard.text += delta.get("text", "")
                blocks[event["index"]]["json"] += delta.get("partial_json", "")
            case "message_delta":
                heard.end = _STOPPED[event["delta"]["stop_reason"]]
    called = [block for block in blocks if block["type"] == "tool_use"]
    heard.calls = [(block["name"], json.loads(block["json"] or "{}")) for block in called]
    return heard


def _responses_answer(body: dict[str, Any]) -> Heard:
    heard = Heard()
    for item in body["output"]:
        parts = "".join(part.get("text", "") for part in item.get("content") or [])
        match item["type"]:
            case "reasoning":
                heard.thoughts += parts
            case "message":
                heard.text += parts
            case "function_call":
                heard.calls.append((item["name"], json.loads(item["arguments"])))
    if body["status"] == "completed":
        heard.end = "calls" if heard.calls else "stop"
    else:
        assert body["incomplete_details"]["reason"] == "max_output_tokens"
        heard.end = "length"
    return heard


def _responses_stream(events: list[dict[str, Any]]) -> Heard:
    """Read a stream: its last event has the whole answer, its deltas say the same."""
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    heard = _responses_answer(events[-1]["response"])
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == heard.text
    return heard


_BODIES = {"chat": _chat, "messages": _messages, "responses": _responses}
_ANSWERS = {"chat": _chat_answer, "messages": _messages_answer, "responses": _responses_answer}
_STREAMS = {"chat": _chat_stream, "messages": _messages_stream, "responses": _responses_stream}
