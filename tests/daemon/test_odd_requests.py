"""What agents and their tools send that is odd and is served, in all protocols.

It stands in the history, or comes with every request: refused, it would end the conversation.
"""

from collections.abc import Callable
from typing import Any

import pytest

from .running import Reply, RunningDaemon

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SAID = [{"role": "user", "content": "hello"}]
HOSTED = {"type": "web_search_20250305", "name": "web_search"}

Post = Callable[..., Reply]


def chat(daemon: RunningDaemon, schema: Any, choice: str, **about: Any) -> Reply:
    """Offer a tool in a chat completion, as the second one."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters, **about}}
        for name, parameters in (("other", {"type": "object"}), ("look", schema))
    ]
    body = {"messages": SAID, "max_tokens": 4, "tools": tools, "tool_choice": choice}
    return daemon.post(body, CHAT)


def messages(daemon: RunningDaemon, schema: Any, choice: str, **about: Any) -> Reply:
    """Offer it in a message, behind a tool that the server would run."""
    tools = [HOSTED, {"name": "look", "input_schema": schema, **about}]
    kind = "any" if choice == "required" else choice
    body = {"messages": SAID, "max_tokens": 4, "tools": tools, "tool_choice": {"type": kind}}
    return daemon.post(body, MESSAGES)


def responses(daemon: RunningDaemon, schema: Any, choice: str, **about: Any) -> Reply:
    """Offer it in a response, inside a namespace and behind a hosted tool."""
    inner = [
        {"type": "function", "name": name, "parameters": parameters, **about}
        for name, parameters in (("other", {"type": "object"}), ("look", schema))
    ]
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "eyes", "tools": inner}]
    body = {"input": "hello", "max_output_tokens": 4, "tools": tools, "tool_choice": choice}
    return daemon.post(body, RESPONSES)


PLACES = {
    chat: "tools.1.function.parameters",
    messages: "tools.1.input_schema",
    responses: "tools.1.tools.1.parameters",
}
SLIPS: list[dict[str, Any]] = [
    {"type": "object", "properties": []},
    {"type": "object", "properties": None, "required": None, "additionalProperties": None},
    {"type": "object", "properties": {"a": {"type": "string", "required": True}}},
    {"type": "object", "properties": {"a": {"type": None, "description": None, "enum": None}}},
    {"type": "object", "properties": {"a": {"items": [], "examples": "x", "deprecated": "v2"}}},
    {"type": "object", "properties": {"a": {"format": "colour", "title": 1, "$comment": {}}}},
    {"type": "object", "properties": {"a": {"not": {}}}},
]
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "properties": {"a": {"type": "any"}}}, ".properties.a.type: must be one"),
    ({"type": "object", "properties": {"a": {"minimum": "0"}}}, ".properties.a.minimum: must be"),
    ({"type": "object", "required": "a"}, ".required: must be a list of names"),
]


@pytest.mark.parametrize("ask", PLACES)
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_slips_in_schemas(tiny_daemon: RunningDaemon, ask: Post, choice: str) -> None:
    """They say nothing, whether arguments are held to the schema or not."""
    for schema in SLIPS:
        reply = ask(tiny_daemon, schema, choice)
        assert reply.status == 200, (schema, reply.body)


@pytest.mark.parametrize("ask", PLACES)
def test_faults_in_schemas(tiny_daemon: RunningDaemon, ask: Post) -> None:
    """They are refused where they are enforced, under the name that the client knows."""
    for schema, words in FAULTS:
        for choice in ("auto", "none"):
            assert ask(tiny_daemon, schema, choice).status == 200, schema
        for reply in (
            ask(tiny_daemon, schema, "required"),
            ask(tiny_daemon, schema, "auto", strict=True),
        ):
            assert reply.status == 400, schema
            assert reply.json()["error"]["message"].startswith(f"{PLACES[ask]}{words}")


@pytest.mark.parametrize("ask", PLACES)
def test_schemas_without_bounds(tiny_daemon: RunningDaemon, ask: Post) -> None:
    """They are refused even where nothing is enforced."""
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    reply = ask(tiny_daemon, deep, "none")
    assert reply.status == 400
    words = f"{PLACES[ask]}: is nested deeper than 96 levels"
    assert reply.json()["error"]["message"] == words


@pytest.mark.parametrize("ask", PLACES)
def test_bad_names_of_tools(tiny_daemon: RunningDaemon, ask: Post) -> None:
    """Their place is the one in the body."""
    reply = ask(tiny_daemon, {"type": "object"}, "auto", name="two words")
    place = {chat: "tools[0]", messages: "tools[1]", responses: "tools[1].tools[0]"}[ask]
    assert reply.status == 400
    assert reply.json()["error"]["message"].startswith(f"{place} is named ")
