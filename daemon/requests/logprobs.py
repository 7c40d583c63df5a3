"""Log-probabilities: which of an answer's tokens go with which piece of its text."""

import codecs
from collections import deque

import msgspec

from ...models.params import LogProbs
from ...models.text.codec import TextCodec

_Text = tuple[str, tuple[int, ...] | None]
_LEAST = -9999.0  # what OpenAI writes for a token that cannot come: JSON has no infinity


# None of these is tracked by the garbage collector: answers have hundreds of thousands, and each
# collection would stop the event loop while it looks at all of them. They refer to no containers
# but tuples of numbers and of each other.


class TopLogProb(msgspec.Struct, gc=False):
    """A token that was or could have been chosen, as OpenAI's chat completions write it.

    Attributes:
        token: its text, with U+FFFD for bytes that are no UTF-8 on their own; a special
            token's name.
        logprob: a finite number.
        bytes: exactly what it writes; None for a special token, which writes nothing.
    """

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class TokenLogProb(TopLogProb, gc=False):
    """A token of the answer, and the likeliest ones in its place, likeliest first."""

    top_logprobs: tuple[TopLogProb, ...]


class Told(msgspec.Struct, frozen=True, gc=False):
    """A token of the answer, and the character of the text in which it begins."""

    place: int
    token: TokenLogProb


ENTRY_BYTES = 100
"""Bytes that one log-probability takes until its answer is sent."""


class LogprobBuffer:
    """Keeps an answer's tokens until the text that they begin in is passed on.

    Between a token and its text stand the detokenizer, which waits for whole characters,
    and the search for stop sequences, which holds text back or cuts it away. A token is
    handed out once, with the piece of text that has the character of its first byte.

    Args:
        codec: of the model.
        markup: special tokens that write their text; as for the detokenizer.
        continues: likewise.
    """

    def __init__(
        self, codec: TextCodec, markup: frozenset[int] = frozenset(), *, continues: bool = False
    ) -> None:
        self._codec = codec
        self._markup = markup
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not continues
        self._texts: dict[tuple[int, bool], _Text] = {}
        self._written = 0
        self._held: deque[Told] = deque()

    def push(self, token: int, logprobs: LogProbs) -> None:
        """Take the next token of the answer."""
        text, numbers = self._text(token)
        top = tuple(self._likely(other, value) for other, value in logprobs.top)
        told = TokenLogProb(text, _finite(logprobs.chosen), numbers, top)
        self._held.append(Told(self._place(bytes(numbers or ())), told))
        self._first = self._first and numbers is None

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
        text, numbers = self._text(token)
        return TopLogProb(text, _finite(logprob), numbers)

    def _text(self, token: int) -> _Text:
        """Read what a token writes here; the same objects each time, as few differ."""
        found = self._texts.get((token, self._first))
        if found is None:
            text, data = self._codec.read_token(token, first=self._first, visible=self._markup)
            found = text, None if data is None else tuple(data)
            self._texts[token, self._first] = found
        return found

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


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)  # in this order: it makes NaN the least, too
