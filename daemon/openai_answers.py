"""OpenAI's answers: completions, chunks, usage."""

import time
from typing import Any, Literal

import msgspec

from .generation import Generation, Piece, Usage
from .logprobs import TokenLogProb, Told

Kind = Literal["chat", "text"]


class Answer:
    """Writes one generation in the shapes of one endpoint.

    Args:
        generation: the answer.
        kind: `chat` for chat completions, `text` for completions.
        model: the name the answer carries.
        fingerprint: the model's fingerprint, sent as `system_fingerprint`.
    """

    def __init__(self, generation: Generation, kind: Kind, model: str, fingerprint: str) -> None:
        self._generation = generation
        self._kind = kind
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        self._id = generation.request.id.replace("req", prefix, 1)
        self._common = {
            "id": self._id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, piece: Piece) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": self._logprobs(piece.tokens),
            "finish_reason": self._generation.finish_reason,
        }
        if self._kind == "chat":
            choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
        else:
            choice["text"] = piece.text
        return {
            **self._common,
            "object": "chat.completion" if self._kind == "chat" else "text_completion",
            "choices": [choice],
            "usage": usage(self._generation.usage),
        }

    def first(self) -> bytes | None:
        """The event a stream begins with, if it has one."""
        if self._kind == "text":
            return None
        return self._event([self._choice({"role": "assistant", "content": ""})])

    def piece(self, piece: Piece) -> bytes:
        """The event of one piece of text."""
        choice = self._choice({"content": piece.text}, piece.text)
        return self._event([{**choice, "logprobs": self._logprobs(piece.tokens)}])

    def last(self) -> bytes:
        """The event that says why the answer ended."""
        return self._event([self._choice({}, "", self._generation.finish_reason)])

    def usage(self) -> bytes:
        """The event that carries the usage, after the last one."""
        return self._event([], usage=usage(self._generation.usage))

    def _choice(
        self, delta: dict[str, Any], text: str = "", finish_reason: str | None = None
    ) -> dict[str, Any]:
        content = {"delta": delta} if self._kind == "chat" else {"text": text}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}

    def _logprobs(self, tokens: list[Told] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        if self._kind == "text":
            return _columns(tokens)
        return {"content": [told.token for told in tokens], "refusal": None}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        return event({**self._common, "object": kind, "choices": choices, **more})


def _columns(tokens: list[Told]) -> dict[str, Any]:
    """Log-probabilities as text completions write them."""
    return {
        "tokens": [told.token.token for told in tokens],
        "token_logprobs": [told.token.logprob for told in tokens],
        "top_logprobs": [_by_text(told.token) for told in tokens],
        "text_offset": [told.place for told in tokens],
    }


def _by_text(chosen: TokenLogProb) -> dict[str, float]:
    """The likeliest tokens and the chosen one; of two with one text the likelier."""
    by_text: dict[str, float] = {}
    for token in (*chosen.top_logprobs, chosen):
        by_text.setdefault(token.token, token.logprob)
    return by_text


def usage(used: Usage) -> dict[str, Any]:
    """OpenAI's usage, with the cached tokens always in it."""
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
