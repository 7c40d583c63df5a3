"""Paths as clients spell them: what they are made of a base URL."""

from typing import Any

import pytest

from .running import RunningDaemon
from .test_bad_input import GOOD

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": GOOD,
    "completions": {"prompt": "hello", "max_tokens": 2},
    "messages": GOOD,
    "messages/count_tokens": GOOD,
    "responses": {"input": "hello", "max_output_tokens": 2},
}
SPELLINGS = ("/v1/{}", "//v1/{}", "/v1//{}", "/v1/{}/", "/v1/v1/{}", "/{}", "//{}//")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_posted(tiny_daemon: RunningDaemon, spelling: str) -> None:
    """Each route is served."""
    for route, body in BODIES.items():
        reply = tiny_daemon.post(body, spelling.format(route))
        assert reply.status == 200, (route, reply.body)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_names_in_paths(tiny_daemon: RunningDaemon, spelling: str) -> None:
    """They are the same."""
    models = tiny_daemon.request("GET", spelling.format("models"))
    assert models.json()["object"] == "list"
    model = tiny_daemon.request("GET", spelling.format("models/default"))
    assert (model.status, model.json()["object"]) == (200, "model")
    name = tiny_daemon.post(BODIES["responses"], "/v1/responses").json()["id"]
    response = tiny_daemon.request("GET", spelling.format(f"responses/{name}"))
    assert response.json()["id"] == name


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_names_with_a_slash(tiny_daemon: RunningDaemon, spelling: str) -> None:
    """A model's name may have one: the 404 says the whole name."""
    reply = tiny_daemon.request("GET", spelling.format("models/org/name"))
    assert reply.status == 404
    assert "'org/name'" in reply.json()["error"]["message"]


def test_slashes_inside(tiny_daemon: RunningDaemon) -> None:
    """Two of them are one."""
    assert tiny_daemon.post(GOOD, "/v1/chat//completions").status == 200


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_errors_keep_their_shape(tiny_daemon: RunningDaemon, spelling: str) -> None:
    """A route of Anthropic's answers in Anthropic's words."""
    reply = tiny_daemon.post({"messages": []}, spelling.format("messages"))
    assert (reply.status, reply.json()["type"]) == (400, "error")
    assert tiny_daemon.request("GET", spelling.format("messages")).status == 405
    assert "type" not in tiny_daemon.post({}, spelling.format("chat/completions")).json()


@pytest.mark.parametrize(
    "path", ["/api/tags", "/api/chat", "/v1/nothing", "/v2/models", "/messagesx"]
)
def test_other_routes(tiny_daemon: RunningDaemon, path: str) -> None:
    """They are told where umbel's are."""
    reply = tiny_daemon.request("GET", path)
    assert reply.status == 404
    message = reply.json()["error"]["message"]
    assert message.startswith(f"GET {path}: Not Found; umbel speaks OpenAI's protocol at /v1/chat")
    assert message.endswith("and Anthropic's at /v1/messages")
