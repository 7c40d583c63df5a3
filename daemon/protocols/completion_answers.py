"""Answers of OpenAI's text completions, whole and in chunks."""

from typing import Any

from ...models.text.events import TextDelta
from ..requests.answer_reader import Delta
from ..requests.generation import Generation
from ..requests.logprobs import TokenLogProb, Told
from .answers import COMMENT
from .openai_answers import OpenAIAnswers


class CompletionAnswers(OpenAIAnswers):
    """Writes the answers of one text completion."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def opening(self) -> bytes:
        """A comment: text completions have no first event."""
        return COMMENT

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

    def _whole_choice(self, index: int, generation: Generation) -> dict[str, Any]:
        answer = generation.reader.collected()
        return {
            "index": index,
            "text": answer.text,
            "logprobs": _columns(answer.tokens),
            "finish_reason": generation.finish_reason,
        }

    def _chunk(
        self,
        choice: int,
        text: str,
        finish: str | None = None,
        tokens: list[Told] | None = None,
    ) -> bytes:
        shown = {"index": choice, "text": text, "finish_reason": finish}
        return self._event([{**shown, "logprobs": _columns(tokens)}])


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
