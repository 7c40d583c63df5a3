"""Log-probabilities: which of an answer's tokens go with which piece of its text."""

import codecs
from collections import deque
from typing import NamedTuple

import msgspec

from ..models.params import LogProbs
from ..models.text.codec import TextCodec

_LEAST = -9999.0  # what OpenAI writes for a token that cannot come: JSON has no infinity


class TopLogProb(msgspec.Struct):
    """A token that was or could have been chosen, as OpenAI's chat completions write it.

    Attributes:
        token: its text, with U+FFFD for bytes that are no UTF-8 on their own; a special
            token's name.
        logprob: a finite number.
        bytes: exactly what it writes; None for a special token, which writes nothing.
    """

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogProb(TopLogProb):
    """A token of the answer, and the likeliest ones in its place, likeliest first."""

    top_logprobs: list[TopLogProb]


class Told(NamedTuple):
    """A token of the answer, and the character of the text in which it begins."""

    place: int
    token: TokenLogProb


class LogprobBuffer:
    """Keeps an answer's tokens until the text that they begin in is passed on.

    Between a token and its text stand the detokenizer, which waits for whole characters,
    and the search for stop sequences, which holds text back or cuts it away. A token is
    handed out once, with the piece of text that has the character of its first byte.

    Args:
        codec: of the model.
        markup: special tokens that write their text; as for the detokenizer.
    """

    def __init__(self, codec: TextCodec, markup: frozenset[int] = frozenset()) -> None:
        self._codec = codec
        self._markup = markup
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._written = 0
        self._held: deque[Told] = deque()

    def push(self, token: int, logprobs: LogProbs) -> None:
        """Take the next token of the answer."""
        text, data = self._codec.read_token(token, first=self._first, visible=self._markup)
        top = [self._likely(other, value) for other, value in logprobs.top]
        told = TokenLogProb(text, _finite(logprobs.chosen), _numbers(data), top)
        self._held.append(Told(self._place(data or b""), told))
        self._first = self._first and data is None

    def between(self, start: int, end: int) -> list[Told]:
        """Hand out the tokens that begin in `[start, end)` of the text, and drop earlier ones."""
        told = []
        while self._held and self._held[0].place < end:
            token = self._held.popleft()
            if token.place >= start:
                told.append(token)
        return told

    def rest(self) -> list[Told]:
        """Hand out what is left at the end of an answer that no stop sequence has cut.

        Besides the tokens of the last piece those are tokens without text: special ones,
        and those of a character that the answer ends in.
        """
        told = list(self._held)
        self._held.clear()
        return told

    def _likely(self, token: int, logprob: float) -> TopLogProb:
        text, data = self._codec.read_token(token, first=self._first, visible=self._markup)
        return TopLogProb(text, _finite(logprob), _numbers(data))

    def _place(self, data: bytes) -> int:
        """Count the characters of the text before the one that the next byte lies in."""
        if not data:
            return self._written
        done = self._utf8.decode(data[:1])
        # The byte is in the last character so far. Bytes that wait for more are one character, or
        # two where they can be no beginning (a surrogate's), which the decoder sees later.
        waiting = self._utf8.getstate()[0].decode(errors="replace")
        place = self._written + len(done) + len(waiting) - 1
        self._written += len(done) + len(self._utf8.decode(data[1:]))
        return place


def _numbers(data: bytes | None) -> list[int] | None:
    return None if data is None else list(data)


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)  # in this order: it makes NaN the least, too
