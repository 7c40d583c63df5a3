"""The response object of OpenAI's responses, which every answer and most events carry."""

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from ..http.failures import APIError
from ..requests.generation import Usage
from .openai_fields import bound_of
from .responses import ResponsesRequest

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]

_TOO_LONG = "context_length_exceeded"
_BUSY = frozenset({429, 503})


class ResponseObject:
    """Makes response objects of one request: what stays the same, and what comes of it.

    Args:
        response_id: its id.
        model: the name the answer carries.
        body: of the request; what is said of it is read at once.
        tools: those that the model is told of, as the client sent them.
    """

    def __init__(
        self, response_id: str, model: str, body: ResponsesRequest, tools: Sequence[Raw]
    ) -> None:
        self.id = response_id
        reasoning = body.reasoning
        text_format = (body.text and body.text.format) or None
        named = body.conversation_name
        self._fixed: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "conversation": {"id": named} if named else None,
            "instructions": body.instructions,
            "max_output_tokens": bound_of(max_output_tokens=body.max_output_tokens),
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": body.summary},
            "service_tier": "flex" if body.flex else "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {
                "format": msgspec.to_builtins(text_format) or {"type": "text"},
                "verbosity": (body.text and body.text.verbosity) or "medium",
            },
            "tool_choice": body.tool_choice or "auto",
            "tools": list(tools),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def make(
        self,
        status: Status,
        output: Sequence[Any] = (),
        usage: Usage | None = None,
        error: APIError | None = None,
    ) -> dict[str, Any]:
        """Make the object as it is now."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._fixed,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None if error is None else _error(error),
            "incomplete_details": cut,
            "output": list(output),
            "usage": None if usage is None else _usage(usage),
        }


def _usage(used: Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }


def _error(error: APIError) -> dict[str, Any]:
    """Write an error with the codes that clients of responses know."""
    if error.code == _TOO_LONG:
        code = _TOO_LONG
    elif error.status in _BUSY:
        code = "rate_limit_exceeded"
    else:
        code = "server_error" if error.status >= 500 else "invalid_prompt"  # noqa: PLR2004
    return {"code": code, "message": error.message}
