"""One answer's tokens become its parts: detokenised, parsed, searched for stop sequences.

Log-probabilities go with the piece of text that their token begins in.
"""

import codecs
import secrets
from collections import deque
from typing import NamedTuple

import msgspec

from ...models.params import LogProbs
from ...models.text.codec import TextCodec
from ...models.text.conversation import ToolCall
from ...models.text.events import (
    OutputEvent,
    PlainParser,
    ReasoningDelta,
    StopScanner,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from ...models.text.output import OutputParser

ENTRY_BYTES = 100
"""Bytes that one log-probability takes until its answer is sent."""

_LEAST = -9999.0  # OpenAI's number for a token that cannot come: JSON has no infinity
_TokenText = tuple[str, tuple[int, ...] | None]

# None of the next three is tracked by the garbage collector: answers have hundreds of thousands,
# and each collection would stop the event loop while it visits them all. They refer to no
# containers but tuples of numbers and of each other.


class TopLogProb(msgspec.Struct, gc=False):
    """A token that was or could have been chosen, as OpenAI's chat completions write it."""

    token: str  # its text, with U+FFFD for bytes that are no UTF-8; a special token's name
    logprob: float  # a finite number
    bytes: tuple[int, ...] | None  # exactly those that it writes; None for a special token


class TokenLogProb(TopLogProb, gc=False):
    """A token of the answer, and the likeliest ones in its place, likeliest first."""

    top_logprobs: tuple[TopLogProb, ...]


class Told(msgspec.Struct, frozen=True, gc=False):
    """A token of the answer, and the character of the text in which it begins."""

    place: int
    token: TokenLogProb


Parser = OutputParser | PlainParser
"""Finds reasoning and tool calls in text."""


class Delta(NamedTuple):
    """More of an answer."""

    event: OutputEvent  # its text may be empty if only tokens are left
    tokens: list[Told] | None = None  # those that begin in a text; None if not asked for


Part = TextDelta | ReasoningDelta | ToolCall
"""A call, or all of a text or a thought up to the next part of another kind."""


class CollectedAnswer(msgspec.Struct):
    """An answer so far."""

    parts: list[Part] = []  # in the order in which they came
    text: str = ""  # its content
    reasoning: str = ""
    calls: list[ToolCall] = []  # with their arguments so far
    tokens: list[Told] | None = None  # of the content; None if not asked for


class AnswerReader:
    """Reads one answer, token by token."""

    def __init__(
        self,
        codec: TextCodec,
        parser: Parser,
        stops: list[str],  # sequences that end the content
        *,
        logprobs: bool,  # tokens are handed out with the text
        markup: frozenset[int] = frozenset(),  # special tokens whose text the parser must see
        continues: bool = False,  # the answer goes on from the prompt's text
    ) -> None:
        self._detokenizer = codec.detokenizer(markup, continues=continues)
        self._parser = parser
        self._scanner = StopScanner(stops)
        self._held_at = 0  # where the text begins that the scanner holds
        self._held = 0
        self._logprobs = LogprobBuffer(codec, markup, continues=continues) if logprobs else None
        self._last_is_text = True
        self.reasoning_tokens = 0
        self._parts: list[_Part] = []
        self._calls: list[_Part] = []
        self._tokens: list[Told] = []

    @property
    def stop_sequence(self) -> str | None:
        """The stop sequence that ended the content, if one did."""
        return self._scanner.matched

    @property
    def has_calls(self) -> bool:
        """True if the answer asks for a call."""
        return bool(self._calls)

    @property
    def done(self) -> bool:
        """True if no later token is part of the answer."""
        return self._scanner.matched is not None or self._parser.done

    def push(self, token: int, logprobs: LogProbs | None) -> list[Delta]:
        """Take the next token; return the deltas that it makes certain."""
        self.reasoning_tokens += self._parser.in_reasoning
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.push(token, logprobs)
        return self._read(self._parser.push(self._detokenizer.push(token)))

    def flush(self) -> list[Delta]:
        """End of the answer: return the deltas that were held back."""
        deltas = self._read(self._parser.flush())
        if self._scanner.matched is None:
            deltas += self._texts(self._scanner.flush())
            buffer = self._logprobs
            if buffer is not None and self._last_is_text and (rest := buffer.rest()):
                self._tokens += rest
                deltas.append(Delta(TextDelta("", self._held_at), rest))
        return deltas

    def collected(self) -> CollectedAnswer:
        """Put together the answer so far."""
        parts = [part.collected() for part in self._parts]
        return CollectedAnswer(
            parts,
            "".join(part.text for part in parts if isinstance(part, TextDelta)),
            "".join(part.text for part in parts if isinstance(part, ReasoningDelta)),
            [part for part in parts if isinstance(part, ToolCall)],
            None if self._logprobs is None else self._tokens,
        )

    def _read(self, events: list[OutputEvent]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            if self._scanner.matched is not None:
                break
            if isinstance(event, TextDelta):
                deltas += self._content(event)
            else:
                deltas += self._texts(self._scanner.flush())
                deltas.append(Delta(self._other(event)))
        return deltas

    def _content(self, event: TextDelta) -> list[Delta]:
        """Let the content through that cannot belong to a stop sequence."""
        deltas = []
        if event.start != self._held_at + self._held:
            deltas += self._texts(self._scanner.flush())
            self._held_at = event.start
        text = self._scanner.push(event.text)
        self._held += len(event.text)
        return deltas + self._texts(text)

    def _texts(self, text: str) -> list[Delta]:
        """Hand out the next text of the content that the scanner held."""
        if not text:
            return []
        start, end = self._held_at, self._held_at + len(text)
        self._held_at, self._held = end, self._held - len(text)
        self._last_is_text = True
        self._extend(TextDelta("", start), text)
        tokens = None if self._logprobs is None else self._logprobs.between(start, end)
        self._tokens += tokens or []
        return [Delta(TextDelta(text, start), tokens)]

    def _extend(self, empty: TextDelta | ReasoningDelta, text: str) -> None:
        """Add to the last part, or to a new one if that is of another kind."""
        if not self._parts or type(self._parts[-1].empty) is not type(empty):
            self._parts.append(_Part(empty, []))
        self._parts[-1].fragments.append(text)

    def _other(self, event: OutputEvent) -> OutputEvent:
        """Keep what is not content; a call gets the name that its result will refer to."""
        self._last_is_text = False
        match event:
            case ReasoningDelta():
                self._extend(ReasoningDelta(""), event.text)
            case ToolCallStart():
                # Not the model's own id: its numbers start again with each answer.
                call_id = f"call_{secrets.token_hex(12)}"
                call = _Part(ToolCall(id=call_id, name=event.name, arguments=""), [])
                self._calls.append(call)
                self._parts.append(call)
                return event._replace(id=call_id)
            case ToolCallDelta():
                self._calls[event.call].fragments.append(event.arguments)
        return event


class _Part(NamedTuple):
    """A part that is coming: itself without text, and the fragments of its text."""

    empty: Part
    fragments: list[str]

    def collected(self) -> Part:
        text = "".join(self.fragments)
        if isinstance(self.empty, ToolCall):
            return msgspec.structs.replace(self.empty, arguments=text)
        return self.empty._replace(text=text)


class LogprobBuffer:
    """Keeps an answer's tokens until the text that they begin in is passed on.

    Between a token and its text stand the detokenizer, which waits for whole characters, and the
    search for stop sequences, which holds text back or cuts it away. A token is handed out once,
    with the piece of text that has the character of its first byte. The arguments are those of
    the detokenizer.
    """

    def __init__(
        self, codec: TextCodec, markup: frozenset[int] = frozenset(), *, continues: bool = False
    ) -> None:
        self._codec = codec
        self._markup = markup
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = not continues
        self._texts: dict[tuple[int, bool], _TokenText] = {}
        self._written = 0
        self._held: deque[Told] = deque()

    def push(self, token: int, logprobs: LogProbs) -> None:
        """Take the next token of the answer."""
        text, numbers = self._text(token)
        top = tuple(
            TopLogProb(other, _finite(value), data)
            for (other, data), value in ((self._text(i), value) for i, value in logprobs.top)
        )
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
        """Hand out the tokens left at the end of an answer that no stop sequence has cut.

        They are the tokens of the last piece, and tokens without text: special ones, and those
        of a character that the answer ends in.
        """
        told = list(self._held)
        self._held.clear()
        return told

    def _text(self, token: int) -> _TokenText:
        """Read a token's text here; the same objects each time, as few differ."""
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
