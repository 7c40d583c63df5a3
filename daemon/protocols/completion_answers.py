"""Answers of OpenAI's text completions, whole and in chunks."""

import time
from typing import Any

from ...models.text.events import TextDelta
from ..answer_reader import Delta
from ..failures import APIError
from ..generation import Generation
from ..generations import Generations
from ..logprobs import TokenLogProb, Told
from .answers import COMMENT, data_event
from .chat_answers import DONE, usage_of


class CompletionAnswers:
    """Writes the answers of one text completion; see `AnswerEncoder`.

    Args:
        request_id: of the request.
        generations: its answers.
        model: the name the answer carries.
        fingerprint: the model's fingerprint, sent as `system_fingerprint`.
        usage: whether a stream carries its usage.
    """

    def __init__(
        self,
        request_id: str,
        generations: Generations,
        model: str,
        fingerprint: str,
        *,
        usage: bool,
    ) -> None:
        self._generations = generations
        self._usage = usage
        self._common = {
            "id": request_id.replace("req", "cmpl", 1),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [_whole_choice(i, g) for i, g in enumerate(self._generations.answers)]
        return {**self._common, "choices": choices, "usage": usage_of(self._generations.usage)}

    def opening(self) -> bytes:
        """A comment: text completions have no first event."""
        return COMMENT

    def began(self, _choice: int) -> bytes:
        """Nothing."""
        return b""

    def deltas(self, choice: int, deltas: list[Delta]) -> bytes:
        """A chunk for each part."""
        return b"".join(
            self._chunk(choice, delta.event.text, tokens=delta.tokens)
            for delta in deltas
            if isinstance(delta.event, TextDelta)
        )

    def ended(self, choice: int) -> bytes:
        """The chunk that says why a choice ended."""
        return self._chunk(choice, "", self._generations.answers[choice].finish_reason)

    def closing(self) -> bytes:
        """The usage, if it was asked for, and the end."""
        usage = {"choices": [], "usage": usage_of(self._generations.usage)}
        return (data_event({**self._common, **usage}) if self._usage else b"") + DONE

    def keepalive(self) -> bytes:
        """A comment."""
        return COMMENT

    def failure(self, error: APIError) -> bytes:
        """The error; no `[DONE]` follows it."""
        return b"data: " + error.body() + b"\n\n"

    def _chunk(
        self,
        choice: int,
        text: str,
        finish: str | None = None,
        tokens: list[Told] | None = None,
    ) -> bytes:
        shown = {"index": choice, "text": text, "finish_reason": finish}
        return data_event({**self._common, "choices": [{**shown, "logprobs": _columns(tokens)}]})


def _whole_choice(index: int, generation: Generation) -> dict[str, Any]:
    answer = generation.reader.collected()
    return {
        "index": index,
        "text": answer.text,
        "logprobs": _columns(answer.tokens),
        "finish_reason": generation.finish_reason,
    }


def _columns(tokens: list[Told] | None) -> dict[str, Any] | None:
    """Log-probabilities as text completions write them."""
    if tokens is None:
        return None
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
