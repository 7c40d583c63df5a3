"""Fields of other servers and protocols that would change an answer: refused, never ignored."""

import json
from typing import Any

import pytest

from umbel.daemon.http.decoding import CheckedBody, decode
from umbel.daemon.http.failures import APIError
from umbel.daemon.protocols import messages, openai_fields, responses
from umbel.daemon.protocols.chat import ChatRequest
from umbel.daemon.protocols.completions import CompletionRequest
from umbel.daemon.protocols.messages import MessagesRequest
from umbel.daemon.protocols.responses import ResponsesRequest
from umbel.daemon.protocols.template_options import read_options

SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[type[CheckedBody], dict[str, Any]] = {
    ChatRequest: {"messages": SAID},
    CompletionRequest: {"prompt": "hi"},
    ResponsesRequest: {"input": "hi"},
    MessagesRequest: {"messages": SAID, "max_tokens": 4},
}
SHARED = [
    (kind, field)
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest)
    for field in openai_fields._REFUSED
]
OWN = [
    *((MessagesRequest, field) for field in messages._FOREIGN),
    *((ResponsesRequest, field) for field in responses._REFUSED),
    (ChatRequest, "reasoning"),
    (ChatRequest, "echo"),
]


@pytest.mark.parametrize(("kind", "field"), [*SHARED, *OWN])
def test_a_field_that_would_change_the_answer(kind: type[CheckedBody], field: str) -> None:
    """It is named, with what to send instead."""
    value: Any = True if field in ("echo", "background") else {"effort": "low"}
    with pytest.raises(APIError, match=f"^{field} is not supported; ") as refusal:
        decode(json.dumps({**BODIES[kind], field: value}).encode(), kind)
    error = refusal.value
    assert (error.status, error.param, error.code) == (400, field, "unsupported_parameter")


@pytest.mark.parametrize(("kind", "field"), SHARED)
def test_a_value_that_changes_nothing(kind: type[CheckedBody], field: str) -> None:
    """It is served: some clients send what is the default anyway."""
    neutral, _ = openai_fields._REFUSED[field]
    for value in (None, neutral):
        decode(json.dumps({**BODIES[kind], field: value}).encode(), kind)


@pytest.mark.parametrize("field", responses._REFUSED_OF_REASONING)
def test_members_of_reasoning(field: str) -> None:
    """One that would change the answer is refused; its neutral value and unknown ones are not."""
    neutral, _ = responses._REFUSED_OF_REASONING[field]

    def send(value: object) -> ResponsesRequest:
        reasoning = {field: value, "effort": "low", "unknown": 1}
        return decode(
            json.dumps({"input": "hi", "reasoning": reasoning}).encode(), ResponsesRequest
        )

    for value in (None, neutral):
        assert send(value)._effort == "low"
    for value in {5, not neutral} - {neutral}:
        with pytest.raises(APIError, match=f"^reasoning.{field} is not supported; ") as refusal:
            send(value)
        error = refusal.value
        assert (error.status, error.code) == (400, "unsupported_parameter")
        assert error.param == f"reasoning.{field}"


@pytest.mark.parametrize("name", ["self", "sanitize_control_tokens", "messages", "tokenize"])
def test_templates_are_not_told_what_rendering_says(name: str) -> None:
    """A name that the library takes itself is refused in words of its own."""
    with pytest.raises(APIError, match=f"cannot set '{name}'; leave it out") as refusal:
        read_options({name: True}, None)
    assert (refusal.value.status, refusal.value.param) == (400, "chat_template_kwargs")
