"""Odd requests of agents and their tools that are served, in all protocols.

It stands in the history, or comes with every request: refused, it would end the conversation.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .running import Reply, RunningDaemon, running

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
    {"$schema": "http://json-schema.org/draft-07/schema#"},
    {"title": "NoArguments"},
    {"properties": None},
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


# -- calls and results of the history -----------------------------------------------------------

CALLS = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for tool_call in (m.tool_calls or []) | map(attribute="function") %}<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ dict(tool_call.arguments.items()) | tojson }}}
</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
"""As Qwen2.5's, where arguments must be an object."""
LOOK = {
    "type": "object",
    "properties": {"where": {"type": "string", "minLength": 400}},
    "required": ["where"],
}


@pytest.fixture(scope="module")
def objects_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon whose template takes a call's arguments as an object."""
    from ..tiny import tiny_model_dir  # noqa: PLC0415  (it imports mlx.core)

    model = tiny_model_dir(tmp_path_factory.mktemp("models") / "m")
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": CALLS}))
    with tempfile.TemporaryDirectory(prefix="u") as folder, running(Path(folder), model) as daemon:
        yield daemon


def chat_history(arguments: Any, result: Any, said: Any = "hello") -> tuple[str, dict[str, Any]]:
    """Send a call and its result in a chat completion."""
    called = {"id": "c1", "type": "", "function": {"name": "look", "arguments": arguments}}
    messages = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]
    return CHAT, {"messages": messages, "max_tokens": 2, "tools": tools}


def messages_history(
    arguments: Any, result: Any, said: Any = "hello"
) -> tuple[str, dict[str, Any]]:
    """Send them in a message."""
    called = {"type": "tool_use", "id": "c1", "name": "look", "input": arguments}
    thought = {"type": "thinking", "thinking": None, "signature": None}
    messages = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": [thought, {"type": "text", "text": None}, called]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": result}],
        },
    ]
    tools = [{"name": "look", "input_schema": LOOK}]
    return MESSAGES, {"messages": messages, "max_tokens": 2, "tools": tools}


def responses_history(
    arguments: Any, result: Any, said: Any = "hello"
) -> tuple[str, dict[str, Any]]:
    """Send them in a response."""
    items = [
        {"role": "user", "content": said},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": result},
    ]
    tools = [{"type": "function", "name": "look", "parameters": LOOK}]
    return RESPONSES, {"input": items, "max_output_tokens": 2, "tools": tools}


HISTORIES = [chat_history, messages_history, responses_history]
History = Callable[..., tuple[str, dict[str, Any]]]


@pytest.mark.parametrize("history", HISTORIES)
def test_calls_with_odd_arguments(objects_daemon: RunningDaemon, history: History) -> None:
    """The call that umbel itself was cut in, and what other servers and agents make."""
    texts = ['{"where": "he', "[1]", '"x"', "null", "5", "", "no JSON"]
    values: list[Any] = [None, {}, [1], 5]
    for arguments in [*texts, *values]:
        path, body = history(arguments, "Nothing.")
        reply = objects_daemon.post(body, path)
        assert reply.status == 200, (arguments, reply.body)


def test_a_call_that_was_cut_comes_back(objects_daemon: RunningDaemon) -> None:
    """It is sent with its arguments as far as they came, and served in the next request."""
    _, body = chat_history("{}", "Nothing.")
    asked = {**body, "messages": body["messages"][:1], "max_tokens": 250, "temperature": 0}
    forced = {"type": "function", "function": {"name": "look"}}
    reply = objects_daemon.post({**asked, "tool_choice": forced}, CHAT)
    (choice,) = reply.json()["choices"]
    assert choice["finish_reason"] == "length"
    (called,) = choice["message"]["tool_calls"]
    assert '"where"' in called["function"]["arguments"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(called["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": called["id"], "content": "The call was cut."}
    talk = [*asked["messages"], choice["message"], result]
    assert objects_daemon.post({**asked, "messages": talk, "max_tokens": 2}, CHAT).status == 200


PICTURES: dict[History, list[dict[str, Any]]] = {
    chat_history: [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "file", "file": {"file_data": "AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
    messages_history: [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
        },
        {"type": "audio", "data": "AAAA"},
    ],
    responses_history: [
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        {"type": "input_file", "file_data": "AAAA"},
        {"type": "input_audio", "data": "AAAA"},
    ],
}
KINDS = ("image", "document", "recording")


@pytest.mark.parametrize("history", HISTORIES)
def test_pictures_in_results(tiny_daemon: RunningDaemon, history: History) -> None:
    """A text stands for each, so that an agent's conversation goes on."""
    seen = []
    for part, kind in zip(PICTURES[history], KINDS, strict=True):
        path, body = history({}, [{"type": "text", "text": "Here: "}, part])
        reply = tiny_daemon.post(body, path)
        assert reply.status == 200, (kind, reply.body)
        seen.append(prompt_tokens(reply))
    assert min(seen) > prompt_tokens(tiny_daemon.post(history({}, "Here: ")[1], path)) + 20


def test_pictures_inside_documents_of_results(tiny_daemon: RunningDaemon) -> None:
    """A text stands for them, too; citations of what a tool found end nothing."""
    image = PICTURES[messages_history][0]
    source = {"type": "content", "content": [{"type": "text", "text": "Here: "}, image]}
    document = {"type": "document", "source": source, "citations": {"enabled": True}}
    found = {"type": "search_result", "source": "s", "title": "t", "citations": {"enabled": True}}
    for block in (document, {**found, "content": [{"type": "text", "text": "Here."}]}):
        path, body = messages_history({}, [block])
        reply = tiny_daemon.post(body, path)
        assert reply.status == 200, reply.body


def test_pictures_become_text(tiny_daemon: RunningDaemon) -> None:
    """The kind of each, and that it cannot be seen."""
    for part, words in zip(
        PICTURES[chat_history],
        ("[an image; ", "[a document, such as a PDF; ", "[a recording; "),
        strict=True,
    ):
        _, body = chat_history("{}", [{"type": "text", "text": "Here: "}, part])
        tokens = tiny_daemon.post({"messages": body["messages"]}, "/tokenize").json()["tokens"]
        told = tiny_daemon.post({"tokens": tokens}, "/detokenize").json()["prompt"]
        assert f"Here: {words}this model cannot" in told


@pytest.mark.parametrize("history", HISTORIES)
def test_pictures_of_users(tiny_daemon: RunningDaemon, history: History) -> None:
    """They are refused: the user is told, and not only the model."""
    for part in PICTURES[history][:2]:
        path, body = history({}, "Nothing.", [part])
        assert tiny_daemon.post(body, path).status == 400


def test_claude_code_drops_refused_fields(tiny_daemon: RunningDaemon) -> None:
    """It looks for these words, and sends the message again without the block."""
    image, document, _ = PICTURES[messages_history]
    for part, words in (
        (image, "Could not process image: "),
        (document, "does not support PDF input: "),
    ):
        path, body = messages_history({}, "Nothing.", [part])
        assert words in tiny_daemon.post(body, path).json()["error"]["message"]


@pytest.mark.parametrize("history", HISTORIES)
def test_half_a_surrogate_pair(tiny_daemon: RunningDaemon, history: History) -> None:
    """It is read as U+FFFD, wherever it stands."""
    path, body = history({"where": "HALF"}, "a HALF", "b HALF")
    whole = json.dumps(body).replace("HALF", "\ufffd")
    half = json.dumps(body).replace("HALF", "\\ud83d")
    replies = [tiny_daemon.post(sent.encode(), path) for sent in (whole, half)]
    assert [reply.status for reply in replies] == [200, 200]
    assert len({prompt_tokens(reply) for reply in replies}) == 1


def prompt_tokens(reply: Reply) -> int:
    """Read how long a prompt was."""
    used = reply.json()["usage"]
    cached = used.get("cache_read_input_tokens", 0)
    return int(used.get("prompt_tokens") or used["input_tokens"] + cached)
