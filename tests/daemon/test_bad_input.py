"""The table in docs/http/bad-input.md, row by row, against a running daemon."""

import gzip
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from .running import Reply, RunningDaemon

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
# Greedy: drawn at random, the first token is now and then the one that ends the answer.
MESSAGE = {"role": "user", "content": "hello"}
GOOD = {"messages": [MESSAGE], "max_tokens": 2, "temperature": 0}
DOC = Path(__file__).parents[2] / "docs" / "http" / "bad-input.md"
PART = {"type": "text", "text": "x"}
CALL = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f"}}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "4"}
HUGE = 64 * 1024 * 1024 + 1

Send = Callable[[RunningDaemon], Reply]


class Row(NamedTuple):
    name: str
    status: int
    kind: str
    code: str | None
    words: str


def rows() -> list[Row]:
    table = re.findall(
        r"^\| (.+?) \| (\d{3}) \| (\w+) \| (\w*) ?\| (.+) \|$", DOC.read_text(), re.MULTILINE
    )
    return [Row(name, int(s), kind, code or None, words) for name, s, kind, code, words in table]


def chat(**fields: Any) -> Send:
    return lambda daemon: daemon.post({**GOOD, **fields})


def text(**fields: Any) -> Send:
    return lambda daemon: daemon.post({"prompt": "hello", "max_tokens": 2, **fields}, TEXT)


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def respond(**fields: Any) -> Send:
    return lambda daemon: daemon.post(
        {"input": "hello", "max_output_tokens": 2, **fields}, RESPONSES
    )


def raw(body: bytes) -> Send:
    return lambda daemon: daemon.post(body)


def message(*blocks: Any, **fields: Any) -> Send:
    """Send a good message of Anthropic's with some fields changed, or with these blocks."""
    blocked = {"messages": [{"role": "user", "content": list(blocks)}]} if blocks else {}
    return lambda daemon: daemon.post({**GOOD, **blocked, **fields}, MESSAGES)


def _too_large(daemon: RunningDaemon, route: str = CHAT) -> Reply:
    body = b'{"messages": "' + b"x" * HUGE + b'"}'
    rest = f"Content-Length: {len(body)}\r\n\r\n".encode() + body[: 2**20]
    return _by_hand(daemon, rest, route)


def _headers_only(daemon: RunningDaemon, route: str = CHAT) -> Reply:
    return _by_hand(daemon, b"Content-Length: 100\r\n\r\n", route)


def _many_input_items(daemon: RunningDaemon) -> Reply:
    name = respond()(daemon).json()["id"]
    return daemon.request("GET", f"{RESPONSES}/{name}/input_items?limit=1000")


def _by_hand(daemon: RunningDaemon, rest: bytes, route: str = CHAT) -> Reply:
    """Send bytes that no HTTP client would, and read one answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(daemon.socket))
        connection.sendall(f"POST {route} HTTP/1.1\r\nHost: localhost\r\n".encode() + rest)
        head, _, body = _read_all(connection).partition(b"\r\n\r\n")
    return Reply(int(head.split()[1]), {}, body)


def _read_all(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


CASES: dict[str, Send] = {
    "malformed JSON": raw(b'{"messages": ['),
    "an empty body": raw(b""),
    "a body that is not an object": raw(b"[]"),
    "invalid UTF-8": raw(b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'),
    "100,000 nested brackets": raw(b'{"metadata": ' + b"[" * 100_000),
    "a body over 64 MiB": _too_large,
    "headers, and then no body": _headers_only,
    "a field of the wrong type": chat(max_tokens="many"),
    "no messages field": raw(b"{}"),
    "empty messages": chat(messages=[]),
    "an unknown role": chat(messages=[{"role": "robot", "content": "hi"}]),
    "an image": chat(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    ),
    "a part that is not text": chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]
    ),
    "a part with a malformed cache_control": chat(
        messages=[{"role": "user", "content": [{**PART, "cache_control": {"ttl": "1h"}}]}]
    ),
    "a call in the old form": chat(
        messages=[{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]
    ),
    "a tool result without a call": chat(messages=[RESULT]),
    "a tool result before its call": chat(messages=[RESULT, CALL]),
    "an unknown model": chat(model="gpt-99"),
    "an empty prompt": text(prompt=""),
    "an empty list of tokens": text(prompt=[]),
    "a prompt token that does not exist": text(prompt=[1, 99999999]),
    "129 prompts": text(prompt=["a"] * 129),
    "17 prompts of 8 answers each": text(prompt=["a"] * 17, n=8),
    "16 prompts of 5 answers each, with 5 log-probabilities": text(
        prompt=["a"] * 16, n=5, logprobs=5
    ),
    "prompts that mix tokens and text": text(prompt=["a", 5]),
    "an empty list among prompts": text(prompt=[[5], []]),
    "a prompt longer than the context": text(prompt=[5] * 9000),
    "max_tokens of 0": chat(max_tokens=0),
    "max_tokens below -1": chat(max_tokens=-5),
    "temperature below 0": chat(temperature=-0.1),
    "temperature over 2": chat(temperature=2.1),
    "temperature that is not a number": raw(
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
    ),
    "top_p over 1": chat(top_p=1.5),
    "top_k below -1": chat(top_k=-2),
    "top_k=1000000": chat(top_k=1000000),
    "min_p over 1": chat(min_p=2),
    "repetition_penalty of 0": chat(repetition_penalty=0),
    "presence_penalty over 2": chat(presence_penalty=3),
    "frequency_penalty below -2": chat(frequency_penalty=-3),
    "logit_bias on a token that does not exist": chat(logit_bias={"99999999": 5}),
    "logit_bias on a token below 0": chat(logit_bias={"-1": 5}),
    "logit_bias on a word": chat(logit_bias={"hello": 5}),
    "logit_bias over 100": chat(logit_bias={"5": 1000}),
    "a stop sequence of 10,000 characters": chat(stop="x" * 10_000),
    "an empty stop sequence": chat(stop=[""]),
    "17 stop sequences": chat(stop=[str(i) for i in range(17)]),
    "n=9": chat(n=9),
    "n=0": text(n=0),
    "a prompt_cache_key of 300 characters": chat(prompt_cache_key="k" * 300),
    "logprobs as a number": chat(logprobs=3),
    "top_logprobs without logprobs": chat(top_logprobs=3),
    "top_logprobs with logprobs=false": chat(logprobs=False, top_logprobs=0),
    "top_logprobs over 20": chat(logprobs=True, top_logprobs=21),
    "top_logprobs below 0": chat(logprobs=True, top_logprobs=-1),
    "logprobs as true in a text completion": text(logprobs=True),
    "logprobs over 5 in a text completion": text(logprobs=6),
    "logprobs below 0 in a text completion": text(logprobs=-1),
    "a tool without a name": chat(tools=[{"type": "function", "function": {}}]),
    "a tool without a function": chat(tools=[{"type": "function"}]),
    "a tool with a bad name": chat(tools=[tool("two words")]),
    "two tools of one name": chat(tools=[tool("f"), tool("f")]),
    "a tool of another type": chat(tools=[{"type": "web_search"}]),
    "a tool whose parameters are no object": chat(tools=[tool("f", parameters=[])]),
    "a tool choice that names no tool": chat(
        tools=[tool("f")], tool_choice={"type": "function", "function": {"name": "g"}}
    ),
    "a tool choice of required without tools": chat(tool_choice="required"),
    "an unknown tool choice": chat(tools=[tool("f")], tool_choice="perhaps"),
    "functions": chat(functions=[{"name": "f"}]),
    "a response_format of another type": chat(response_format={"type": "xml"}),
    "a response_format without a schema": chat(response_format={"type": "json_schema"}),
    "a response_format in a text completion": text(response_format={"type": "json_object"}),
    "two forms for the answer": chat(response_format={"type": "json_object"}, guided_regex="a"),
    "an empty regex": text(guided_regex=""),
    "an empty list of choices": text(guided_choice=[]),
    "1,001 choices": text(structured_outputs={"choice": ["a"] * 1001}),
    "a choice that begins like a call": chat(
        tools=[tool("f")], structured_outputs={"choice": ["yes", "<tool_call>"]}
    ),
    "a regex of calls": chat(tools=[tool("f")], guided_regex="<tool_call>.*"),
    "a grammar": chat(structured_outputs={"grammar": "root ::= x"}),
    "a guided_grammar": chat(guided_grammar="root ::= x"),
    "a chat_template_kwargs that rendering sets": chat(chat_template_kwargs={"messages": []}),
    "a chat_template_kwargs that is not an identifier": chat(chat_template_kwargs={"a b": 1}),
    "65 chat_template_kwargs": chat(chat_template_kwargs={f"a{i}": 1 for i in range(65)}),
    "an unknown verbosity": chat(verbosity="loud"),
    "web_search_options": chat(web_search_options={}),
    "audio": chat(audio={"voice": "x"}),
    "audio modalities": chat(modalities=["audio"]),
    "suffix": text(suffix="end"),
    "echo": text(echo=True),
    "best_of=3": text(best_of=3),
    "use_beam_search": text(use_beam_search=True),
    "min_tokens": chat(min_tokens=5),
    "ignore_eos": chat(ignore_eos=True),
    "stop_token_ids": chat(stop_token_ids=[5]),
    "bad_words": chat(bad_words=["no"]),
    "length_penalty": text(length_penalty=1.2),
    "typical_p": chat(typical_p=0.5),
    "stream_options without stream": chat(stream_options={"include_usage": True}),
    "a conversation name of 300 characters": lambda daemon: daemon.request(
        "POST", CHAT, GOOD, {"X-Umbel-Conversation": "c" * 300}
    ),
    "a conversation name with control characters": lambda daemon: daemon.request(
        "POST", CHAT, GOOD, {"X-Umbel-Conversation": "caf\xe9"}
    ),
    "a conversation in the body with control characters": chat(conversation="a\xa01"),
    "a conversation in the body of 300 characters": chat(conversation={"id": "c" * 300}),
    "an unknown key": lambda daemon: daemon.request(
        "POST", CHAT, GOOD, {"Authorization": "Bearer umbel-nobodys"}
    ),
    "a tenant's name without a proxy's key": lambda daemon: daemon.request(
        "POST", CHAT, GOOD, {"X-Umbel-Tenant": "another"}
    ),
    "an unknown priority": lambda daemon: daemon.request(
        "POST", CHAT, GOOD, {"X-Umbel-Priority": "high"}
    ),
    "a timeout that is not a number": lambda daemon: daemon.request(
        "POST", CHAT, GOOD, {"X-Umbel-Timeout": "soon"}
    ),
    "an unknown service_tier": chat(service_tier="slow"),
    "a compressed body": lambda daemon: daemon.request(
        "POST", CHAT, gzip.compress(msgspec.json.encode(GOOD)), {"Content-Encoding": "gzip"}
    ),
    "half of a request's headers": lambda daemon: _by_hand(daemon, b"Content-Length: 5"),
    "10,001 messages": chat(messages=[MESSAGE] * 10_001),
    "1,001 parts in a message": chat(messages=[{"role": "user", "content": [PART] * 1001}]),
    "2 million empty parts": raw(
        b'{"messages": [{"role": "user", "content": [' + b"{}," * 2_000_000 + b"{}]}]}"
    ),
    "1,025 tools": chat(tools=[{}] * 1025),
    "1,025 ids in logit_bias": chat(logit_bias={str(i): 1 for i in range(1025)}),
    "3 million prompt tokens": lambda daemon: daemon.post(
        b'{"prompt": [' + b"1," * 3_000_000 + b"1]}", TEXT
    ),
    "5 million blanks": raw(b'{"user": ' + b" " * 5_000_000 + b'"x"}'),
    "3 million escapes": raw(b'{"user": "' + rb"\n" * 3_000_000 + b'"}'),
    "a message of 9 MiB": chat(messages=[{"role": "user", "content": "x" * (9 << 20)}]),
    "a model name of 9 MiB": chat(model="x" * (9 << 20)),
    "a model name of 1,000 characters": chat(model="x" * 1000),
    "a role of 1,000 characters": chat(messages=[{"role": "x" * 1000, "content": "hi"}]),
    "input that is not HTTP": lambda daemon: _by_hand(daemon, b"Content-Length: many\r\n\r\n"),
    "control codes in a path": lambda daemon: daemon.request("GET", "/%1b%5b31m"),
    "7 MB of text": text(prompt="word " * 1_400_000),
    "an unknown route": lambda daemon: daemon.request("GET", "/v1/nothing"),
    "a wrong method": lambda daemon: daemon.request("GET", CHAT),
    "a message without max_tokens": message(max_tokens=None),
    "malformed JSON in a message": lambda daemon: daemon.post(b'{"messages": [', MESSAGES),
    "a message of an unknown role": message(messages=[{"role": "robot", "content": "hi"}]),
    "a message with an image": message({"type": "image", "source": {"type": "url", "url": "x"}}),
    "a message with an unknown block": message({"type": "video"}),
    "a message with 1,001 blocks": message(*[PART] * 1001),
    "a message with a PDF": message({"type": "document", "source": {"type": "base64"}}),
    "a message with a cache_control of another type": message(
        {**PART, "cache_control": {"type": "persistent"}}
    ),
    "a message's system with a malformed cache_control": message(
        system=[{**PART, "cache_control": True}]
    ),
    "a tool_result without its tool_use": message({"type": "tool_result", "tool_use_id": "t1"}),
    "a message list that ends with an assistant's": message(
        messages=[MESSAGE, {"role": "assistant", "content": "The"}]
    ),
    "a message's tool without a schema": message(tools=[{"name": "look"}]),
    "a message's tool of an unknown type": message(tools=[{"type": "magic_1", "name": "m"}]),
    "a message's tool_choice that names no tool": message(
        tools=[{"name": "see", "input_schema": {}}], tool_choice={"type": "tool", "name": "look"}
    ),
    "a message's tool_choice that names a server's tool": message(
        tools=[
            {"type": "web_search_20250305", "name": "web_search"},
            {"name": "see", "input_schema": {}},
        ],
        tool_choice={"type": "tool", "name": "web_search"},
    ),
    "a message that clears tool uses": message(
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}
    ),
    "a message that thinks beyond max_tokens": message(
        thinking={"type": "enabled", "budget_tokens": 1024}
    ),
    "a message with an MCP server": message(mcp_servers=[{"type": "url", "url": "x"}]),
    "a message with two formats": message(
        output_format={"type": "json_schema", "schema": {}},
        output_config={"format": {"type": "json_schema", "schema": {}}},
    ),
    "a message to an unknown model": message(model="claude-99"),
    "a message longer than the context": message(
        messages=[{"role": "user", "content": "word " * 4000}]
    ),
    "a compressed message": lambda daemon: daemon.request(
        "POST", MESSAGES, gzip.compress(msgspec.json.encode(GOOD)), {"Content-Encoding": "gzip"}
    ),
    "a message's body over 64 MiB": lambda daemon: _too_large(daemon, MESSAGES),
    "a message's headers, and then no body": lambda daemon: _headers_only(daemon, MESSAGES),
    "a count of nothing": lambda daemon: daemon.post({}, f"{MESSAGES}/count_tokens"),
    "an unknown route below messages": lambda daemon: daemon.request("GET", f"{MESSAGES}/batches"),
    "a wrong method for messages": lambda daemon: daemon.request("GET", MESSAGES),
    "a response without input": lambda daemon: daemon.post({}, RESPONSES),
    "a response with an empty input": respond(input=[]),
    "an input that is null": respond(input=None),
    "10,001 items": respond(input=[MESSAGE] * 10_001),
    "an item that is a number": respond(input=[1]),
    "an item of an unknown type": respond(input=[{"type": "robot"}]),
    "an item without a role": respond(input=[{"content": "hi"}]),
    "an image in a response": respond(
        input=[{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]
    ),
    "an item of 9 MiB": respond(input=[{"role": "user", "content": "x" * (9 << 20)}]),
    "an input text of 9 MiB": respond(input="x" * (9 << 20)),
    "a function's output without a call": respond(
        input=[MESSAGE, {"type": "function_call_output", "call_id": "c", "output": "x"}]
    ),
    "an item reference to an unknown item": respond(input=[{"type": "item_reference", "id": "x"}]),
    "an unknown previous_response_id": respond(previous_response_id="resp_x"),
    "a previous_response_id of 1,000 characters": respond(previous_response_id="x" * 1000),
    "a response in the background": respond(background=True),
    "a prompt template": respond(prompt={"id": "pmpt_1"}),
    "a response with n=2": respond(n=2),
    "a tool of an unknown type": respond(tools=[{"type": "robot"}]),
    "a custom tool of an unknown format": respond(
        tools=[{"type": "custom", "name": "f", "format": {"type": "magic"}}]
    ),
    "a tool_choice of a hosted tool": respond(tool_choice={"type": "web_search"}),
    "unknown allowed tools": respond(
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]}
    ),
    "an unknown include": respond(include=["everything"]),
    "top_logprobs of a response without include": respond(top_logprobs=2),
    "an unknown verbosity of a response": respond(text={"verbosity": "loud"}),
    "an unknown summary": respond(reasoning={"summary": "long"}),
    "a bound on a response's reasoning": respond(reasoning={"max_tokens": 9}),
    "a schema format without a schema": respond(text={"format": {"type": "json_schema"}}),
    "17 pairs of metadata": respond(metadata={str(i): "x" for i in range(17)}),
    "an unknown response": lambda daemon: daemon.request("GET", f"{RESPONSES}/resp_x"),
    "a stored response as a stream": lambda daemon: daemon.request(
        "GET", f"{RESPONSES}/resp_x?stream=true"
    ),
    "input items by the thousand": _many_input_items,
}


def test_every_row_has_a_case() -> None:
    assert [row.name for row in rows()] == list(CASES)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_row(row: Row, tiny_daemon: RunningDaemon) -> None:
    """The next request is served."""
    reply = CASES[row.name](tiny_daemon)
    error = reply.json()["error"]
    assert (reply.status, error["type"], error.get("code")) == (row.status, row.kind, row.code)
    assert row.words in error["message"]
    assert tiny_daemon.process.poll() is None
    good = tiny_daemon.post(GOOD)
    assert good.status == 200
    assert good.json()["usage"]["completion_tokens"] == 2


def test_bad_fields_are_named(tiny_daemon: RunningDaemon) -> None:
    """`param` names the field at fault, for programs."""
    for name, param in {
        "max_tokens of 0": "max_tokens",
        "top_k=1000000": "top_k",
        "logit_bias over 100": "logit_bias[...]",
        "an unknown model": "model",
        "a tool of another type": "tools[0] of type 'web_search'",
        "two tools of one name": "tools[1]",
        "top_logprobs without logprobs": "top_logprobs",
        "top_logprobs over 20": "top_logprobs",
        "logprobs over 5 in a text completion": "logprobs",
    }.items():
        assert CASES[name](tiny_daemon).json()["error"]["param"] == param


def test_null_means_absent(tiny_daemon: RunningDaemon) -> None:
    """Clients send null for what they leave to the server."""
    names = (
        *("model", "stream", "temperature", "top_p", "top_k", "seed", "stop", "n", "logit_bias"),
        *("logprobs", "top_logprobs", "stream_options", "tools", "tool_choice"),
        *("max_completion_tokens", "presence_penalty", "frequency_penalty", "response_format"),
    )
    assert tiny_daemon.post(GOOD | dict.fromkeys(names)).status == 200


def test_unknown_fields_are_accepted(tiny_daemon: RunningDaemon) -> None:
    """SDKs add fields of their own."""
    extra = {"metadata": {"a": "b"}, "user": "u", "store": False, "service_tier": "auto"}
    assert tiny_daemon.post(GOOD | extra).status == 200


def test_neutral_values_are_served(tiny_daemon: RunningDaemon) -> None:
    neutral = {
        "best_of": 1,
        "use_beam_search": False,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": [],
        "bad_words": [],
        "length_penalty": 1.0,
        "typical_p": 1,
        "modalities": ["text"],
        "verbosity": "medium",
        "functions": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
    }
    assert tiny_daemon.post(GOOD | neutral).status == 200


def test_extreme_numbers_are_served(tiny_daemon: RunningDaemon) -> None:
    extremes: list[dict[str, Any]] = [
        {"max_tokens": 10**30, "stop": ["a", "e", "i", " "]},
        {"seed": -(10**30)},
        {"temperature": 2, "top_p": 0},
        {"temperature": 1e-9},
        {"top_k": 384},
        {"logit_bias": {str(i): -100 for i in range(384)}},
        {"repetition_penalty": 10, "presence_penalty": 2, "frequency_penalty": -2},
        {"min_p": 1},
        {"logprobs": True, "top_logprobs": 20},
    ]
    for fields in extremes:
        reply = tiny_daemon.post(GOOD | fields)
        assert reply.status == 200, (fields, reply.body)


def test_allowed_methods_are_named(tiny_daemon: RunningDaemon) -> None:
    assert tiny_daemon.request("GET", CHAT).headers["Allow"] == "POST"


def test_garbage_instead_of_http(tiny_daemon: RunningDaemon) -> None:
    """The next request is served."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(tiny_daemon.socket))
        connection.sendall(b"\x00\x01\x02 garbage\r\n\r\n")
        assert b" 400 " in _read_all(connection).splitlines()[0]
    assert tiny_daemon.post(GOOD).status == 200


def test_every_answer_has_a_request_id(tiny_daemon: RunningDaemon) -> None:
    """Errors too."""
    for reply in (
        tiny_daemon.post(GOOD),
        tiny_daemon.post({}),
        CASES["an unknown route"](tiny_daemon),
    ):
        assert reply.headers["x-request-id"]
