"""Fields of other servers and protocols that would change an answer: refused, never ignored."""

import json
from typing import Any

import pytest

from umbel.daemon.http.bodies import CheckedBody, decode
from umbel.daemon.http.failures import APIError
from umbel.daemon.protocols.chat import ChatRequest
from umbel.daemon.protocols.completions import CompletionRequest
from umbel.daemon.protocols.generation_request import (
    GenerationBody,
    Refused,
    refused_fields,
    template_options,
)
from umbel.daemon.protocols.messages import MessagesRequest
from umbel.daemon.protocols.responses import ReasoningOptions, ResponsesRequest

SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[type[CheckedBody], dict[str, Any]] = {
    ChatRequest: {"messages": SAID},
    CompletionRequest: {"prompt": "hi"},
    ResponsesRequest: {"input": "hi"},
    MessagesRequest: {"messages": SAID, "max_tokens": 4},
}
REFUSED = [
    (kind, field, refused)
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
    for field, refused in refused_fields(kind).items()
]
VALUES: dict[str, Any] = {"echo": True, "background": True, "modalities": ["audio"], "suffix": "x"}
"""Values of fields that have a type; of any other a value without meaning."""


def send(kind: type[CheckedBody], **fields: Any) -> None:
    decode(json.dumps({**BODIES[kind], **fields}).encode(), kind)


def test_refused_fields_are_found() -> None:
    """The tests below have those of other servers, of other protocols and of OpenAI."""
    found = {(kind, field) for kind, field, _ in REFUSED}
    assert {(ChatRequest, "best_of"), (ResponsesRequest, "best_of")} < found
    assert {(MessagesRequest, "seed"), (ChatRequest, "reasoning")} < found
    assert len(found) > 3 * 30 + 25


@pytest.mark.parametrize(("kind", "field", "refused"), REFUSED)
def test_field_that_would_change_the_answer(
    kind: type[GenerationBody], field: str, refused: Refused
) -> None:
    """It is named, with what to send instead."""
    value = VALUES.get(field, {"effort": "low"})
    with pytest.raises(APIError) as refusal:
        send(kind, **{field: value})
    error = refusal.value
    assert error.message == f"{field} is not supported; {refused.advice}"
    assert (error.status, error.param, error.code) == (400, field, "unsupported_parameter")


@pytest.mark.parametrize(("kind", "field", "refused"), REFUSED)
def test_neutral_value_of_a_refused_field(
    kind: type[GenerationBody], field: str, refused: Refused
) -> None:
    """It is served: some clients send the default."""
    typed = type(VALUES[field]) if field in VALUES else object
    for value in (None, *(one for one in refused.neutral if isinstance(one, typed))):
        send(kind, **{field: value})


@pytest.mark.parametrize(("field", "refused"), refused_fields(ReasoningOptions).items())
def test_members_of_reasoning(field: str, refused: Refused) -> None:
    """One that would change the answer is refused; neutral values and unknown members are not."""

    def reason(value: object) -> None:
        send(ResponsesRequest, reasoning={field: value, "effort": "low", "unknown": 1})

    for value in (None, *refused.neutral):
        reason(value)
    for value in {5, not refused.neutral} - set(refused.neutral):
        with pytest.raises(APIError, match=f"^reasoning.{field} is not supported; ") as refusal:
            reason(value)
        error = refusal.value
        assert (error.status, error.code) == (400, "unsupported_parameter")
        assert error.param == f"reasoning.{field}"


@pytest.mark.parametrize("name", ["self", "sanitize_control_tokens", "messages", "tokenize"])
def test_template_options_that_rendering_reserves(name: str) -> None:
    """The library has arguments of these names."""
    with pytest.raises(APIError, match=f"cannot set '{name}'; leave it out") as refusal:
        template_options({name: True}, None)
    assert (refusal.value.status, refusal.value.param) == (400, "chat_template_kwargs")
