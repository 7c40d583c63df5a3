"""Tokens of one answer to its parts: detokenised, parsed, searched for stop sequences."""

import secrets
from typing import NamedTuple, Protocol

import msgspec

from ...models.params import LogProbs
from ...models.text.codec import TextCodec
from ...models.text.conversation import ToolCall
from ...models.text.events import (
    OutputEvent,
    ReasoningDelta,
    StopScanner,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from .logprobs import LogprobBuffer, Told


class Parser(Protocol):
    """Finds reasoning and tool calls in text; `models.text.output` has the real ones.

    Attributes:
        done: nothing after this is part of the answer.
    """

    done: bool

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next belongs to the reasoning, as far as is known."""
        ...

    def push(self, text: str) -> list[OutputEvent]:
        """Take more text; return what is certain."""
        ...

    def flush(self) -> list[OutputEvent]:
        """End of text: return what was held back."""
        ...


class Delta(NamedTuple):
    """More of an answer.

    Attributes:
        event: what it is; a text may be empty where only tokens are left.
        tokens: those that begin in a text, with their log-probabilities; None if nobody asked.
    """

    event: OutputEvent
    tokens: list[Told] | None = None


Part = TextDelta | ReasoningDelta | ToolCall
"""A call, or all of a text or a thought up to what comes between it and the next."""


class CollectedAnswer(msgspec.Struct):
    """What has come of an answer so far.

    Attributes:
        parts: in the order in which they came.
        text: its content.
        reasoning: what the model thought first.
        calls: of tools, with what has come of their arguments.
        tokens: of the content, with their log-probabilities; None if nobody asked.
    """

    parts: list[Part] = []
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = []
    tokens: list[Told] | None = None


class AnswerReader:
    """Reads one answer, token by token.

    Args:
        codec: of the model.
        parser: of its answers.
        stops: sequences that end the content.
        logprobs: whether tokens are handed out with the text.
        markup: special tokens whose text the parser must see.
        continues: the answer goes on from the prompt's text.

    Attributes:
        stop_sequence: the one that was found.
        reasoning_tokens: how many tokens the reasoning has had.
    """

    def __init__(
        self,
        codec: TextCodec,
        parser: Parser,
        stops: list[str],
        *,
        logprobs: bool,
        markup: frozenset[int] = frozenset(),
        continues: bool = False,
    ) -> None:
        self._detokenizer = codec.detokenizer(markup, continues=continues)
        self._parser = parser
        self._scanner = StopScanner(stops)
        self._held_at = 0  # where the text begins that the scanner holds
        self._held = 0
        self._ledger = LogprobBuffer(codec, markup, continues=continues) if logprobs else None
        self._last_is_text = True
        self.reasoning_tokens = 0
        self._parts: list[_Text | _Reasoning | _Call] = []
        self._calls: list[_Call] = []
        self._tokens: list[Told] = []

    @property
    def stop_sequence(self) -> str | None:
        """The stop sequence that ended the content, if one did."""
        return self._scanner.matched

    @property
    def has_calls(self) -> bool:
        """Whether the answer asks for a call."""
        return bool(self._calls)

    @property
    def done(self) -> bool:
        """Whether nothing after this is part of the answer."""
        return self._scanner.matched is not None or self._parser.done

    def push(self, token: int, logprobs: LogProbs | None) -> list[Delta]:
        """Take the next token; return what it makes certain."""
        self.reasoning_tokens += self._parser.in_reasoning
        if self._ledger is not None and logprobs is not None:
            self._ledger.push(token, logprobs)
        return self._read(self._parser.push(self._detokenizer.push(token)))

    def flush(self) -> list[Delta]:
        """End of the answer: return what was held back until it was clear that nothing follows."""
        deltas = self._read(self._parser.flush())
        if self._scanner.matched is None:
            deltas += self._texts(self._scanner.flush())
            rest = self._ledger.rest() if self._ledger is not None and self._last_is_text else []
            if rest:
                self._tokens += rest
                deltas.append(Delta(TextDelta("", self._held_at), rest))
        return deltas

    def collected(self) -> CollectedAnswer:
        """Put together what has come so far."""
        parts = [part.collected() for part in self._parts]
        return CollectedAnswer(
            parts,
            "".join(part.text for part in parts if isinstance(part, TextDelta)),
            "".join(part.text for part in parts if isinstance(part, ReasoningDelta)),
            [part for part in parts if isinstance(part, ToolCall)],
            None if self._ledger is None else self._tokens,
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
        """Hand out text of the content, the next of what the scanner was given."""
        if not text:
            return []
        start, end = self._held_at, self._held_at + len(text)
        self._held_at, self._held = end, self._held - len(text)
        self._last_is_text = True
        if not self._parts or not isinstance(self._parts[-1], _Text):
            self._parts.append(_Text(start))
        self._parts[-1].fragments.append(text)
        tokens = None if self._ledger is None else self._ledger.between(start, end)
        self._tokens += tokens or []
        return [Delta(TextDelta(text, start), tokens)]

    def _other(self, event: OutputEvent) -> OutputEvent:
        """Keep what is not content; a call gets the name that its result will refer to."""
        self._last_is_text = False
        match event:
            case ReasoningDelta():
                if not self._parts or not isinstance(self._parts[-1], _Reasoning):
                    self._parts.append(_Reasoning())
                self._parts[-1].fragments.append(event.text)
            case ToolCallStart():
                # Not the model's own: what it counts begins anew with each answer.
                call_id = f"call_{secrets.token_hex(12)}"
                self._calls.append(_Call(call_id, event.name))
                self._parts.append(self._calls[-1])
                return event._replace(id=call_id)
            case ToolCallDelta():
                self._calls[event.call].fragments.append(event.arguments)
        return event


class _Text:
    """A text that is coming."""

    def __init__(self, start: int) -> None:
        self.fragments: list[str] = []
        self._start = start

    def collected(self) -> TextDelta:
        return TextDelta("".join(self.fragments), self._start)


class _Reasoning:
    """A thought that is coming."""

    def __init__(self) -> None:
        self.fragments: list[str] = []

    def collected(self) -> ReasoningDelta:
        return ReasoningDelta("".join(self.fragments))


class _Call:
    """A call whose arguments are coming."""

    def __init__(self, call_id: str, name: str) -> None:
        self.fragments: list[str] = []
        self._id = call_id
        self._name = name

    def collected(self) -> ToolCall:
        return ToolCall(id=self._id, name=self._name, arguments="".join(self.fragments))
