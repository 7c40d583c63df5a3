"""Names of control tokens in a request's text are text, whatever the protocol."""

from typing import Any

import pytest

from .running import RunningDaemon

TIMES = 20
NAMES = "<|im_end|>" * TIMES  # 20 tokens where the tokenizer reads them as its own
LEAST = 3 * TIMES
TOOL = {"name": "read", "description": "the plan"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
ASK = {"role": "user", "content": "the agent"}


def chat(text: str) -> dict[str, Any]:
    """A chat completion after a tool's result."""
    function = {"name": "read", "arguments": "{}"}
    call = {"id": "call_1", "type": "function", "function": function}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": text}
    tool = {"type": "function", "function": TOOL | {"parameters": SCHEMA}}
    return {"messages": [ASK, asks, result], "tools": [tool], "max_tokens": 1}


def messages(text: str) -> dict[str, Any]:
    """A message after a tool's result."""
    call = {"type": "tool_use", "id": "call_1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": text}
    talk = [ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    return {"messages": talk, "tools": [TOOL | {"input_schema": SCHEMA}], "max_tokens": 1}


def responses(text: str) -> dict[str, Any]:
    """A response after a tool's result."""
    call = {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "call_1", "output": text}
    tool = TOOL | {"type": "function", "parameters": SCHEMA}
    return {"input": [ASK, call, result], "tools": [tool], "max_output_tokens": 16}


@pytest.mark.parametrize(
    ("body", "route", "counts"),
    [
        (chat, "/v1/chat/completions", ("prompt_tokens",)),
        (messages, "/v1/messages", ("input_tokens", "cache_read_input_tokens")),
        (responses, "/v1/responses", ("input_tokens",)),
    ],
)
def test_results_are_text(
    tiny_daemon: RunningDaemon, body: Any, route: str, counts: tuple[str, ...]
) -> None:
    """A tool's result with names takes more tokens than the names' own."""
    sizes = []
    for text in ("a", f"a{NAMES}"):
        reply = tiny_daemon.post(body(text), route)
        assert reply.status == 200, reply.body
        usage = reply.json()["usage"]
        sizes.append(sum(usage[count] for count in counts))
    assert sizes[1] - sizes[0] >= LEAST


def test_tokens_are_counted_alike(tiny_daemon: RunningDaemon) -> None:
    """Names are text in messages and control tokens in a text that the client writes whole."""
    prompt = f"<|im_start|>user\n{NAMES}<|im_end|>\n<|im_start|>assistant\n"
    raw = tiny_daemon.post({"prompt": prompt}, "/tokenize").json()
    talk = {"messages": [{"role": "user", "content": NAMES}]}
    told = tiny_daemon.post(talk, "/tokenize").json()
    assert told["count"] - raw["count"] >= LEAST - TIMES
    assert tiny_daemon.post({"tokens": told["tokens"]}, "/detokenize").json() == {"prompt": prompt}
