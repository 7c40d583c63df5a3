"""`/v1/responses` of a running daemon: answers, streams, the store and cancels."""

import json
import threading
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ..answers import named_events
from .running import Reply, RunningDaemon, UnixConnection, eventually, running

ROUTE = "/v1/responses"
GOOD: dict[str, Any] = {"input": "hello", "max_output_tokens": 4, "temperature": 0}
LONG: dict[str, Any] = {"input": "hello", "max_output_tokens": 6000, "temperature": 0}


def respond(daemon: RunningDaemon, **fields: Any) -> Any:
    reply = daemon.post({**GOOD, **fields}, ROUTE)
    assert reply.status == 200, reply.body
    return reply.json()


def get(daemon: RunningDaemon, name: str, more: str = "") -> Reply:
    return daemon.request("GET", f"{ROUTE}/{name}{more}")


def events_of(body: bytes) -> list[dict[str, Any]]:
    events = [event for _, event in named_events(body)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def begin(daemon: RunningDaemon, **fields: Any) -> tuple[UnixConnection, HTTPResponse, str]:
    """Start a long stream; return the id of its response too."""
    connection = daemon.connection()
    body = msgspec.json.encode({**LONG, "stream": True, **fields})
    connection.request("POST", ROUTE, body)
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline() == b"event: response.created\n"
    return connection, response, next_event(response)["response"]["id"]


def next_event(response: HTTPResponse) -> Any:
    while not (line := response.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return json.loads(line.removeprefix(b"data: "))


def until(response: HTTPResponse, kind: str) -> Any:
    while (event := next_event(response))["type"] != kind:
        pass
    return event


def text_of(response: Any) -> str:
    (message,) = response["output"]
    return str(message["content"][0]["text"])


def test_stream_and_whole_response_are_alike(tiny_daemon: RunningDaemon) -> None:
    whole = respond(tiny_daemon)
    reply = tiny_daemon.post({**GOOD, "stream": True}, ROUTE)
    events = events_of(reply.body)
    assert reply.headers["Content-Type"] == "text/event-stream"
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == "response.incomplete"
    assert text_of(last["response"]) == text_of(whole)
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text_of(whole)
    assert whole["usage"]["output_tokens"] == 4
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply.body.count(b"[DONE]") == 0


def test_same_words_as_a_chat(tiny_daemon: RunningDaemon) -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "more"},
    ]
    chat = tiny_daemon.post({"messages": messages, "max_tokens": 4, "temperature": 0}).json()
    answer = respond(tiny_daemon, instructions="be kind", input=messages[1:])
    assert text_of(answer) == chat["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_previous_response(tiny_daemon: RunningDaemon) -> None:
    """As if everything had been sent again; instructions are not carried over."""
    first = respond(tiny_daemon, instructions="be kind")
    second = respond(tiny_daemon, input="more", previous_response_id=first["id"])
    third = respond(tiny_daemon, input="end", previous_response_id=second["id"])
    items = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": text_of(second)},
        {"role": "user", "content": "end"},
    ]
    whole = respond(tiny_daemon, input=items)
    assert text_of(third) == text_of(whole)
    assert third["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert third["previous_response_id"] == second["id"]
    line = next(x for x in tiny_daemon.log().splitlines() if third["id"][5:] in x)
    assert f"conversation={first['id']}" in line


def test_previous_response_is_cached(tiny_daemon: RunningDaemon) -> None:
    first = respond(tiny_daemon, input="the agent reads the plan and writes the code " * 4)
    second = respond(tiny_daemon, input="more", previous_response_id=first["id"])
    cached = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["input_tokens"]


def test_get_returns_the_answer(tiny_daemon: RunningDaemon) -> None:
    """Whole and streamed; also while the connection of the stream is open."""
    whole = respond(tiny_daemon, metadata={"a": "b"}, include=["message.output_text.logprobs"])
    assert get(tiny_daemon, whole["id"]).json() == whole
    last = events_of(tiny_daemon.post({**GOOD, "stream": True}, ROUTE).body)[-1]["response"]
    assert get(tiny_daemon, last["id"]).json() == last


def test_input_items_in_pages(tiny_daemon: RunningDaemon) -> None:
    items = [{"role": "user", "content": str(number), "id": f"m{number}"} for number in range(5)]
    name = respond(tiny_daemon, input=items)["id"]

    def page(query: str) -> tuple[list[str], bool]:
        found = get(tiny_daemon, name, f"/input_items{query}").json()
        return [item["id"] for item in found["data"]], found["has_more"]

    assert page("") == (["m4", "m3", "m2", "m1", "m0"], False)
    assert page("?order=asc&limit=2") == (["m0", "m1"], True)
    assert page("?order=asc&limit=2&after=m1") == (["m2", "m3"], True)
    assert page("?order=asc&limit=2&after=m3") == (["m4"], False)
    for query in ("limit=0", "limit=x", "order=up", "after=m9"):
        reply = get(tiny_daemon, name, f"/input_items?{query}")
        assert reply.status == 400
        assert reply.json()["error"]["param"] == query.partition("=")[0]


def test_item_reference_to_an_answer(tiny_daemon: RunningDaemon) -> None:
    first = respond(tiny_daemon)
    again = {"type": "item_reference", "id": first["output"][0]["id"]}
    question = {"role": "user", "content": "hello"}
    answer = respond(tiny_daemon, input=[question, again, question])
    sent = {"role": "assistant", "content": text_of(first)}
    whole = respond(tiny_daemon, input=[question, sent, question])
    assert answer["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


def test_delete(tiny_daemon: RunningDaemon) -> None:
    """The response is gone for every route; later ones of its chain cannot be continued."""
    first = respond(tiny_daemon)
    second = respond(tiny_daemon, previous_response_id=first["id"])
    reply = tiny_daemon.request("DELETE", f"{ROUTE}/{first['id']}")
    assert reply.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert get(tiny_daemon, first["id"]).status == 404
    assert get(tiny_daemon, first["id"], "/input_items").status == 404
    assert tiny_daemon.request("DELETE", f"{ROUTE}/{first['id']}").status == 404
    assert get(tiny_daemon, second["id"]).status == 200
    for name in (first["id"], second["id"]):
        reply = tiny_daemon.post({**GOOD, "previous_response_id": name}, ROUTE)
        error = reply.json()["error"]
        assert (reply.status, error["code"]) == (404, "previous_response_not_found")
        assert error["message"] == f"Previous response with id '{name}' not found."


def test_store_false_and_refused_requests_store_nothing(tiny_daemon: RunningDaemon) -> None:
    name = respond(tiny_daemon, store=False)["id"]
    assert get(tiny_daemon, name).status == 404
    reply = tiny_daemon.post({**GOOD, "top_k": 10**6}, ROUTE)
    assert reply.status == 400
    refused = reply.headers["x-request-id"].replace("req-", "resp_")
    assert get(tiny_daemon, refused).status == 404


def test_input_tokens(tiny_daemon: RunningDaemon) -> None:
    """Nothing is generated."""
    before = tiny_daemon.status()["engine"]["generation_tokens"]
    first = respond(tiny_daemon)
    reply = tiny_daemon.post(
        {"input": "hello", "previous_response_id": first["id"]}, f"{ROUTE}/input_tokens"
    )
    told = respond(tiny_daemon, previous_response_id=first["id"])["usage"]["input_tokens"]
    assert reply.json() == {"object": "response.input_tokens", "input_tokens": told}
    assert tiny_daemon.status()["engine"]["generation_tokens"] - before <= 8
    reply = tiny_daemon.post({"input": "word " * 90_000}, f"{ROUTE}/input_tokens")
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_cancel(tiny_daemon: RunningDaemon) -> None:
    """The stream ends; the response so far is stored as cancelled, and cannot be continued."""
    connection, response, name = begin(tiny_daemon)
    until(response, "response.output_text.delta")
    assert get(tiny_daemon, name).json()["status"] == "in_progress"
    reply = tiny_daemon.post({**GOOD, "previous_response_id": name}, ROUTE)
    assert reply.status == 400
    assert "is in_progress; go on with one that is completed" in reply.json()["error"]["message"]
    cancelled = tiny_daemon.post({}, f"{ROUTE}/{name}/cancel")
    assert (cancelled.status, cancelled.json()["status"]) == (200, "cancelled")
    last = until(response, "response.incomplete")["response"]
    connection.close()
    assert last["status"] == "cancelled"
    assert get(tiny_daemon, name).json() == last
    again = tiny_daemon.post({}, f"{ROUTE}/{name}/cancel")
    assert again.status == 400
    assert "the response is cancelled" in again.json()["error"]["message"]
    reply = tiny_daemon.post({**GOOD, "previous_response_id": name}, ROUTE)
    assert "is cancelled; go on with" in reply.json()["error"]["message"]
    assert tiny_daemon.post({}, f"{ROUTE}/resp_x/cancel").status == 404


def test_client_that_leaves(tiny_daemon: RunningDaemon) -> None:
    """Its response is cancelled, and can be read."""
    connection, response, name = begin(tiny_daemon)
    until(response, "response.output_text.delta")
    connection.close()
    found = eventually(lambda: _if_over(get(tiny_daemon, name)))
    assert found["status"] == "cancelled"
    assert text_of(found)


def _if_over(reply: Reply) -> Any:
    found = reply.json()
    return None if found.get("status") == "in_progress" else found


def test_delete_while_streaming(tiny_daemon: RunningDaemon) -> None:
    """The answer goes on, and nothing of it is stored."""
    connection, response, name = begin(tiny_daemon, max_output_tokens=500)
    assert get(tiny_daemon, name, "/input_items").json()["data"][0]["role"] == "user"
    assert tiny_daemon.request("DELETE", f"{ROUTE}/{name}").json()["deleted"] is True
    assert get(tiny_daemon, name).status == 404
    assert tiny_daemon.request("DELETE", f"{ROUTE}/{name}").status == 404
    assert until(response, "response.incomplete")["response"]["id"] == name
    connection.close()
    assert get(tiny_daemon, name).status == 404


def test_keepalives_are_events(tiny_daemon: RunningDaemon) -> None:
    """They have numbers too."""
    blocking, first, name = begin(tiny_daemon)
    until(first, "response.output_text.delta")
    connection, waiting, _ = begin(tiny_daemon, max_output_tokens=2)
    kinds = [next_event(waiting) for _ in range(4)]
    assert [event["type"] for event in kinds] == ["response.in_progress"] * 4
    assert [event["sequence_number"] for event in kinds] == [1, 2, 3, 4]
    assert all(event["response"]["status"] == "in_progress" for event in kinds)
    tiny_daemon.post({}, f"{ROUTE}/{name}/cancel")
    assert until(waiting, "response.incomplete")["response"]["status"] == "incomplete"
    blocking.close()
    connection.close()


def test_deadline_in_a_stream_is_an_event(short_path: Path, long_tiny_dir: Path) -> None:
    with running(short_path, long_tiny_dir, env={"UMBEL_REQUEST_TIMEOUT": "1.5"}) as daemon:
        connection, response, name = begin(daemon, max_output_tokens=8000)
        failed = until(response, "response.failed")["response"]
        assert response.read().strip() == b""
        connection.close()
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "server_error"
        assert text_of(failed)
        found = eventually(lambda: _if_over(get(daemon, name)))
        assert found["status"] == "failed"
        assert found["error"] == failed["error"]


def test_items_to_store_count_until_the_end(short_path: Path, long_tiny_dir: Path) -> None:
    """They take memory although they are no tokens."""
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "x" * (5 << 19)}
    items = [thought, {"role": "user", "content": "hello"}]
    with running(short_path, long_tiny_dir, env={"UMBEL_BODY_BYTES": "8MiB"}) as daemon:
        begun = [begin(daemon, input=items, max_output_tokens=8000) for _ in range(2)]
        assert daemon.post({**GOOD, "input": items}, ROUTE).status == 503
        for connection, _, _ in begun:
            connection.close()
        eventually(lambda: daemon.post({**GOOD, "input": items}, ROUTE).status == 200)


@pytest.mark.slow
def test_restart_keeps_responses(short_path: Path, long_tiny_dir: Path) -> None:
    """On disk, within the budget; a damaged store does not stop the daemon."""
    with running(short_path, long_tiny_dir) as daemon:
        first = respond(daemon)
    with running(short_path, long_tiny_dir, fresh=True) as daemon:
        assert get(daemon, first["id"]).json() == first
        second = respond(daemon, input="more", previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    (short_path / "disk" / "responses.sqlite").write_bytes(b"nothing known" * 500)
    with running(short_path, long_tiny_dir) as daemon:
        assert get(daemon, first["id"]).status == 404
        third = respond(daemon)
        assert get(daemon, third["id"]).status == 200
        assert "the stored responses start empty" in daemon.log()
    with running(short_path, long_tiny_dir, "--no-disk") as daemon:
        assert get(daemon, third["id"]).status == 404
        assert get(daemon, respond(daemon)["id"]).status == 200
    with running(short_path, long_tiny_dir, env={"UMBEL_RESPONSES_BYTES": "0"}) as daemon:
        assert get(daemon, third["id"]).status == 404
        assert get(daemon, respond(daemon)["id"]).status == 404


def test_tenants_on_socket_and_tcp(tiny_daemon: RunningDaemon) -> None:
    name = respond(tiny_daemon)["id"]
    connection = HTTPConnection("127.0.0.1", tiny_daemon.tcp_port(), timeout=60)
    try:
        for method, route, body in (
            ("GET", f"{ROUTE}/{name}", None),
            ("DELETE", f"{ROUTE}/{name}", None),
            ("POST", f"{ROUTE}/{name}/cancel", "{}"),
            ("POST", ROUTE, json.dumps({**GOOD, "previous_response_id": name})),
        ):
            connection.request(method, route, body)
            reply = connection.getresponse()
            reply.read()
            assert reply.status == 404, (method, route)
    finally:
        connection.close()
    assert get(tiny_daemon, name).status == 200


def test_parallel_chains_do_not_mix(tiny_daemon: RunningDaemon) -> None:
    wrong: list[str] = []

    def chain(number: int) -> None:
        previous = None
        for turn in range(3):
            text = f"chain {number} turn {turn}"
            found = respond(tiny_daemon, input=text, previous_response_id=previous)
            previous = found["id"]
            (item,) = get(tiny_daemon, previous, "/input_items").json()["data"]
            if item["content"][0]["text"] != text or get(tiny_daemon, previous).json() != found:
                wrong.append(text)

    threads = [threading.Thread(target=chain, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("stream", [False, True])
def test_hosted_tools_are_left_out(tiny_daemon: RunningDaemon, *, stream: bool) -> None:
    """Codex sends one with every request; the answer has only the offered tools."""
    add = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    reply = tiny_daemon.post(
        {**GOOD, "stream": stream, "tools": [add, {"type": "web_search"}]}, ROUTE
    )
    found = events_of(reply.body)[-1]["response"] if stream else reply.json()
    assert found["tools"] == [add]
    assert "hosted tools left out" in tiny_daemon.log()
