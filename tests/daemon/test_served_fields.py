"""Values that clients send in the belief that every server knows them: read as they are meant."""

import json
from typing import Any

import pytest

from umbel.daemon.http.bodies import decode
from umbel.daemon.http.failures import APIError
from umbel.daemon.protocols.chat import ChatRequest
from umbel.daemon.protocols.completions import CompletionRequest
from umbel.daemon.protocols.generation_request import GenerationBody, GenerationRequest
from umbel.daemon.protocols.messages import MessagesRequest
from umbel.daemon.protocols.responses import ResponsesRequest
from umbel.models.text.conversation import Conversation, JSONObject, JSONSchema

SAID = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "required": ["a"]}


def read(kind: type[GenerationBody], **fields: Any) -> GenerationRequest:
    """Read a body to the end."""
    return decode(json.dumps(fields).encode(), kind).generation_request(lambda: None)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ChatRequest, {"messages": SAID}),
        (CompletionRequest, {"prompt": "hi"}),
        (ResponsesRequest, {"input": "hi"}),
    ],
)
def test_tokens_without_a_bound(kind: type[GenerationBody], said: dict[str, Any]) -> None:
    """They are written as -1."""
    assert read(kind, **said, max_tokens=-1).max_tokens is None
    assert read(kind, **said, max_tokens=7).max_tokens == 7
    with pytest.raises(APIError, match=r"^max_tokens: Expected `int` >= 1, or -1"):
        read(kind, **said, max_tokens=0)


def test_the_newer_name_of_a_bound_is_stronger() -> None:
    """Also where it says that there is none."""
    assert (
        read(ChatRequest, messages=SAID, max_tokens=7, max_completion_tokens=-1).max_tokens is None
    )
    assert read(ChatRequest, messages=SAID, max_tokens=7, max_completion_tokens=9).max_tokens == 9


@pytest.mark.parametrize(
    ("sent", "held"),
    [
        ({"type": "json_object"}, JSONObject()),
        ({"type": "json_object", "schema": SCHEMA}, JSONSchema(SCHEMA)),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, JSONSchema(SCHEMA)),
        ({"type": "json_object", "schema": {}}, JSONSchema({"type": "object"})),
        ({"type": "json_object", "schema": True}, JSONObject()),
        ({"type": "json_schema", "schema": SCHEMA}, JSONSchema(SCHEMA)),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, JSONSchema(SCHEMA)),
    ],
)
def test_a_schema_wherever_it_stands(sent: dict[str, Any], held: object) -> None:
    """The answer is held to it, in both of OpenAI's protocols that have formats."""
    assert read(ChatRequest, messages=SAID, response_format=sent).constraint == held
    assert read(ResponsesRequest, input="hi", text={"format": sent}).constraint == held


def test_two_schemas() -> None:
    """It would be a guess to choose one."""
    both = {"type": "json_object", "schema": {}, "json_schema": {"schema": SCHEMA}}
    with pytest.raises(APIError, match="an answer can match one thing"):
        read(ChatRequest, messages=SAID, response_format=both)


@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
def test_verbosity(verbosity: str) -> None:
    """Codex asks for it under the names of models that it knows."""
    read(ChatRequest, messages=SAID, verbosity=verbosity)
    read(ResponsesRequest, input="hi", text={"verbosity": verbosity})


def test_thinking_without_a_budget() -> None:
    """The model may think."""
    request = read(MessagesRequest, messages=SAID, max_tokens=7, thinking={"type": "enabled"})
    (prompt,) = request.prompts
    assert isinstance(prompt, Conversation)
    assert prompt.options == {"enable_thinking": True}


def test_calls_that_ran_at_anthropic() -> None:
    """They are left out, as their tools are."""
    called = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    answer = {"role": "assistant", "content": [called, found, {"type": "text", "text": "a"}]}
    request = read(MessagesRequest, messages=[*SAID, answer, *SAID], max_tokens=7)
    (prompt,) = request.prompts
    assert isinstance(prompt, Conversation)
    assert [message.content for message in prompt.messages] == ["hi", "a", "hi"]
