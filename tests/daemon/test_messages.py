"""Anthropic's messages over HTTP, against the tiny model."""

import http.client
from typing import Any

import anthropic
import httpx2
import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from umbel.daemon.config import Settings
from umbel.daemon.http.app import application
from umbel.daemon.http.failures import APIError, as_api_error
from umbel.daemon.http.handlers.entry import Entry
from umbel.daemon.protocols.errors import error_response
from umbel.scheduler.errors import (
    ComputationError,
    ContextLengthExceededError,
    DeadlineExceededError,
    QueueFullError,
    UnavailableError,
)
from umbel.scheduler.limits import RETRY_AFTER

from ..answers import named_events
from .fixtures import TINY_CONTEXT
from .running import RunningDaemon

MESSAGES = "/v1/messages"
GOOD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 4,
    "temperature": 0,
}


def ask(daemon: RunningDaemon, **fields: Any) -> Any:
    reply = daemon.post({**GOOD, **fields}, MESSAGES)
    assert reply.status == 200, reply.body
    return reply.json()


def test_whole_message(tiny_daemon: RunningDaemon) -> None:
    """Its shape, its usage, and the request's id in its headers."""
    reply = tiny_daemon.post(GOOD, f"{MESSAGES}?beta=true")
    answer = reply.json()
    assert reply.status == 200
    assert answer["id"].removeprefix("msg_") == reply.headers["request-id"].removeprefix("req-")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert answer["usage"]["output_tokens"] == 4


def test_stream_has_the_same_answer(tiny_daemon: RunningDaemon) -> None:
    whole = ask(tiny_daemon)
    reply = tiny_daemon.post({**GOOD, "stream": True}, MESSAGES)
    assert reply.headers["Content-Type"] == "text/event-stream"
    told = named_events(reply.body)
    deltas = [data["delta"]["text"] for name, data in told if name == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"]
    assert told[-2][1]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_usage_adds_up_to_the_count(tiny_daemon: RunningDaemon) -> None:
    """Cached and uncached tokens together are the whole prompt."""
    body = {**GOOD, "system": "The usage adds up, whatever was cached."}
    counted = tiny_daemon.post({**body, "max_tokens": None}, f"{MESSAGES}/count_tokens").json()
    usages = [ask(tiny_daemon, **body)["usage"] for _ in range(2)]
    for usage in usages:
        parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert sum(usage[part] for part in parts) == counted["input_tokens"]
    assert usages[1]["input_tokens"] < usages[0]["input_tokens"]


def test_billing_header_breaks_no_sharing(tiny_daemon: RunningDaemon) -> None:
    """Requests that differ in it alone share as much as equal ones."""
    told = {"type": "text", "text": "Agents that differ in a header share this. " * 10}

    def usage(digest: str, *, first: bool) -> Any:
        words = f"x-anthropic-billing-header: cc_version=2.1.329.{digest}; cc_entrypoint=cli;"
        header = {"type": "text", "text": words}
        return ask(tiny_daemon, system=[header, told] if first else [told, header])["usage"]

    cold = usage("0a8", first=True)
    warm = usage("0a8", first=True)
    assert warm["input_tokens"] < cold["input_tokens"]
    assert usage("bc8", first=True) == warm
    assert usage("ffe", first=False) == warm


def test_conversation_is_claude_codes_session(tiny_daemon: RunningDaemon) -> None:
    """The header names it, or else `user_id`."""
    user_id = '{"device_id":"d","account_uuid":"","session_id":"session-in-body"}'
    ask(tiny_daemon, metadata={"user_id": user_id})
    tiny_daemon.request("POST", MESSAGES, GOOD, {"X-Claude-Code-Session-Id": "session-in-header"})
    assert "conversation=session-in-body/" in tiny_daemon.log()
    assert "conversation=session-in-header/" in tiny_daemon.log()


def test_recorded_request_of_claude_code(tiny_daemon: RunningDaemon) -> None:
    """In the middle of a session; umbel knows every field of it."""
    hint = {"cache_control": {"type": "ephemeral"}}
    header = "x-anthropic-billing-header: cc_version=2.1.329.0a8; cc_entrypoint=sdk-cli;"
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    thought = {"type": "thinking", "thinking": "", "signature": "umbel.SG0="}
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}, **hint}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "It is empty."}
    reminder = {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>", **hint}
    body = {
        "model": "tiny",
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": header},
            {"type": "text", "text": "You are an agent.", **hint},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Read a."}]},
            {"role": "system", "content": [{"type": "text", "text": "Here is Linux.", **hint}]},
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [result, reminder]},
        ],
        "tools": [
            {"name": "Read", "description": "", "input_schema": schema, "defer_loading": True},
        ],
        "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"s"}'},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stop_sequences": ["e", " ", "a"],
        "stream": True,
    }
    reply = tiny_daemon.post(body, f"{MESSAGES}?beta=true")
    assert reply.status == 200, reply.body
    assert named_events(reply.body)[-1] == ("message_stop", {"type": "message_stop"})


def test_any_version_and_any_beta_is_accepted(tiny_daemon: RunningDaemon) -> None:
    headers = {"anthropic-version": "2099-01-01", "anthropic-beta": "claude-code-1,unknown-2"}
    assert tiny_daemon.request("POST", MESSAGES, GOOD, headers).status == 200


def test_tools_that_are_left_out_are_logged(tiny_daemon: RunningDaemon) -> None:
    ask(tiny_daemon, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert "tools left out" in tiny_daemon.log()
    assert "'web_search_20250305'" in tiny_daemon.log()


def test_pings_while_a_request_waits(tiny_daemon: RunningDaemon) -> None:
    """They may come before message_start."""
    busy, response = tiny_daemon.stream(
        {"messages": GOOD["messages"], "max_tokens": 3000, "logit_bias": {"2": -100}}
    )
    try:
        response.readline()
        connection = tiny_daemon.connection()
        connection.request("POST", MESSAGES, msgspec.json.encode({**GOOD, "stream": True}))
        waiting = connection.getresponse()
        assert waiting.readline() == b"event: ping\n"
        assert waiting.readline() == b'data: {"type":"ping"}\n'
    finally:
        busy.close()
    rest = waiting.read()
    connection.close()
    assert rest.count(b"event: message_start\n") == rest.count(b"event: message_stop\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "kind", "raised"),
    [
        (APIError(400, "no"), 400, "invalid_request_error", anthropic.BadRequestError),
        (APIError(401, "no"), 401, "authentication_error", anthropic.AuthenticationError),
        (APIError(403, "no"), 403, "permission_error", anthropic.PermissionDeniedError),
        (APIError(404, "no"), 404, "not_found_error", anthropic.NotFoundError),
        (APIError(405, "no"), 405, "invalid_request_error", anthropic.APIStatusError),
        (APIError(408, "no"), 408, "invalid_request_error", anthropic.APIStatusError),
        (APIError(413, "no"), 413, "request_too_large", anthropic.APIStatusError),
        (APIError(415, "no"), 415, "invalid_request_error", anthropic.APIStatusError),
        (QueueFullError("no", retry_after=3), 429, "rate_limit_error", anthropic.RateLimitError),
        (ComputationError("no"), 500, "api_error", anthropic.InternalServerError),
        (DeadlineExceededError("no"), 504, "timeout_error", anthropic.InternalServerError),
        (
            UnavailableError("no", retry_after=3),
            *(529, "overloaded_error", anthropic.InternalServerError),
        ),
    ],
)
def test_errors_are_the_sdks_exceptions(
    error: Exception, status: int, kind: str, raised: type[anthropic.APIStatusError]
) -> None:
    """Each has Anthropic's status and type."""
    response = error_response(f"{MESSAGES}/count_tokens", "req-1", as_api_error(error))
    body = response.body
    assert isinstance(body, bytes)
    answer = httpx2.Response(response.status, headers=dict(response.headers), content=body)
    transport = httpx2.MockTransport(lambda _: answer)
    with (
        anthropic.Anthropic(
            api_key="-",
            max_retries=0,
            http_client=anthropic.DefaultHttpxClient(transport=transport),
        ) as client,
        pytest.raises(raised) as refused,
    ):
        client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "x"}])
    assert refused.value.status_code == status
    assert refused.value.body == {
        "type": "error",
        "error": {"type": kind, "message": "no"},
        "request_id": "req-1",
    }
    waits = refused.value.response.headers.get("Retry-After")
    assert waits == ("3" if status in (429, 529) else None)


async def test_loading_daemon_is_overloaded() -> None:
    async with TestClient(TestServer(application(Entry(Settings())))) as client:
        response = await client.post(MESSAGES, json=GOOD)
        body = await response.json()
    assert (response.status, response.headers["Retry-After"]) == (529, str(RETRY_AFTER))
    assert body["error"] == {
        "type": "overloaded_error",
        "message": "the model is still loading",
    }
    assert body["request_id"] == response.headers["request-id"]


def test_other_paths_keep_openais_shape() -> None:
    for path in ("/v1/chat/completions", "/v1/messagesx", "/nothing"):
        failure = as_api_error(UnavailableError("no", retry_after=3))
        response = error_response(path, "req-1", failure)
        assert response.status == 503
        assert isinstance(response.body, bytes)
        assert msgspec.json.decode(response.body)["error"]["code"] == "service_unavailable"


def test_words_of_a_prompt_over_the_context(tiny_daemon: RunningDaemon) -> None:
    """Claude Code looks for exactly these, and compacts; the count has the same number."""
    body = {**GOOD, "messages": [{"role": "user", "content": "word " * 4000}]}
    counted = tiny_daemon.post(body, f"{MESSAGES}/count_tokens").json()["input_tokens"]
    assert counted >= TINY_CONTEXT
    reply = tiny_daemon.post(body, MESSAGES)
    assert reply.status == 400
    words = f"prompt is too long: {counted} tokens > {TINY_CONTEXT - 1} maximum"
    assert reply.json()["error"] == {"type": "invalid_request_error", "message": words}


def test_prompt_that_just_does_not_fit_is_over_the_maximum() -> None:
    """No room is left for one token of an answer."""
    error = as_api_error(ContextLengthExceededError("no", tokens=100, most=99))
    response = error_response(MESSAGES, "req-1", error)
    assert isinstance(response.body, bytes)
    message = msgspec.json.decode(response.body)["error"]["message"]
    assert message == "prompt is too long: 100 tokens > 99 maximum"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer secret"}, 200),
        ({"x-api-key": "secret"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ],
)
def test_key_in_either_header(
    locked_daemon: RunningDaemon, headers: dict[str, str], status: int
) -> None:
    """Old clients send x-api-key, new ones a bearer. An error has Anthropic's shape."""
    connection = http.client.HTTPConnection("127.0.0.1", locked_daemon.tcp_port(), timeout=60)
    connection.request("POST", MESSAGES, msgspec.json.encode(GOOD), headers)
    response = connection.getresponse()
    body = msgspec.json.decode(response.read())
    connection.close()
    assert response.status == status
    assert body["type"] == ("message" if status == 200 else "error")
    if status == 401:
        assert body["error"]["type"] == "authentication_error"
        assert body["request_id"] == response.headers["request-id"]
