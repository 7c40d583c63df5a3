"""Generated answers, remembered until a client sends them back, within a budget of bytes."""

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from .codec import TextCodec
from .conversation import Message, Tool
from .events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from .formats import ReasoningFormat
from .output import OutputParser

_LONGEST_OPENING = 1000  # characters of a template's block of thoughts
_Key = tuple[str, str]


class Answer(NamedTuple):
    """A generated answer, and the parts of it that a client can send back.

    Attributes:
        tokens: all of it, without the token that ended it, and without markup before it that the
            template writes.
        opening: what the end of its prompt wrote of the model's thoughts.
        thought: it has thoughts.
        reasoning: their text.
        tail: the tokens behind its thoughts; encoded anew if one of them is part of both.
        content: its text.
        calls: names and arguments, as JSON texts.
    """

    tokens: tuple[int, ...]
    opening: str
    thought: bool
    reasoning: str
    tail: tuple[int, ...]
    content: str
    calls: tuple[tuple[str, str], ...]

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        texts = (self.content, self.opening, self.reasoning, *chain.from_iterable(self.calls))
        return 512 + 40 * len(self.tokens) + 4 * sum(map(len, texts))


class AnswerStore:
    """Answers by tenant and key; what was used longest ago goes first. Any thread may use it.

    Args:
        budget: bytes for all tenants together; an answer that exceeds it alone is not kept.

    Attributes:
        nbytes: about what the answers take in memory.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._answers: OrderedDict[_Key, Answer] = OrderedDict()
        self.nbytes = 0
        self._lock = threading.Lock()

    def put(self, tenant: str, key: str, answer: Answer) -> None:
        """Remember an answer in place of an older one with the same key."""
        with self._lock:
            self._drop((tenant, key))
            self._answers[tenant, key] = answer
            self.nbytes += answer.nbytes
            while self.nbytes > self._budget:
                self._drop(next(iter(self._answers)))

    def find(self, tenant: str, messages: Sequence[Message]) -> dict[int, Answer]:
        """Find the answers of a conversation, by the index of their messages."""
        found = {}
        before = Lineage()
        for index, message in enumerate(messages):
            if message.role == "assistant":
                key = tenant, before.key(message)
                with self._lock:
                    if (answer := self._answers.get(key)) is not None:
                        self._answers.move_to_end(key)
                        found[index] = answer
            before.add(message)
        return found

    def _drop(self, key: _Key) -> None:
        if (answer := self._answers.pop(key, None)) is not None:
            self.nbytes -= answer.nbytes


class Lineage:
    """The messages before an answer as far as a client repeats them: thoughts may be left out."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self._digest = hashlib.sha256()
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        """Go on behind a message."""
        ids = " ".join(call.id for call in message.tool_calls)
        text = f"{message.role}\0{message.content.strip()}\0{ids}\0"
        self._digest.update(text.encode(errors="replace"))

    def key(self, answer: Message) -> str:
        """Name an answer by what a client sends back of it, and of all that came before it."""
        if answer.tool_calls:  # the client got their ids, which are drawn
            return f"call {answer.tool_calls[0].id}"
        digest = self._digest.copy()
        digest.update(answer.content.strip().encode(errors="replace"))
        return f"text {digest.hexdigest()}"


def read_answer(
    codec: TextCodec, tokens: Sequence[int], tools: Sequence[Tool], prompt: str
) -> Answer | None:
    """Make what must be remembered of an answer.

    Args:
        codec: of the model.
        tokens: all that was generated, without the token that ended it.
        tools: those that calls were looked for with; none where calls were left in the text.
        prompt: its rendered prompt, or the end of it.

    Returns:
        None for an answer that cannot be put back: its thoughts have no end, or it ends inside
        a character, or it has special tokens that are no markup, or, where messages have headers,
        it has several besides its thoughts.
    """
    form, detokenizer = codec.template.form, codec.detokenizer(codec.markup_tokens)
    reasoning = form.reasoning
    texts = [detokenizer.push(token) for token in tokens]
    hidden = codec.special_tokens - codec.markup_tokens
    if detokenizer.inside_character or hidden.intersection(tokens):
        return None
    inside = codec.template.opens_reasoning(prompt)
    parser = OutputParser(form, tools=tools, in_reasoning=inside)
    text = "".join(texts)
    events = parser.push(text) + parser.flush()
    thought = inside or any(isinstance(event, ReasoningDelta) for event in events)
    generated = tail = tuple(tokens)
    if form.headed:
        begin = _only_text(text, events, form.content_start)
        if begin is None:
            return None
        tail = _tail(codec, tokens, texts, begin)
        generated = generated if thought else tail
    elif thought:
        match = reasoning and re.search(re.escape(reasoning.end) + r"\s*", text)
        if not match:
            return None
        tail = _tail(codec, tokens, texts, match.end())
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = [event.arguments for event in events if isinstance(event, ToolCallDelta)]
    return Answer(
        generated,
        opening_of(reasoning, prompt),
        thought,
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        tail,
        "".join(event.text for event in events if isinstance(event, TextDelta)),
        tuple(zip(names, arguments, strict=True)),
    )


def _only_text(text: str, events: Sequence[OutputEvent], header: str) -> int | None:
    """Where an answer's text begins, if that is all that follows its thoughts and a header."""
    told = [event for event in events if isinstance(event, TextDelta)]
    begin = told[0].start if told else len(text)
    alone = text[begin:] == "".join(event.text for event in told)
    return begin if alone and text[:begin].rstrip().endswith(header) else None


def _tail(
    codec: TextCodec, tokens: Sequence[int], texts: Sequence[str], begin: int
) -> tuple[int, ...]:
    ends = list(accumulate(map(len, texts)))
    if begin in ends:
        return tuple(tokens[ends.index(begin) + 1 :])
    return tuple(codec.encode_pieces(["", "".join(texts)[begin:]])[1])


def opening_of(reasoning: ReasoningFormat | None, text: str) -> str:
    """The block of thoughts, opened or empty, at the end of a text."""
    if reasoning is None:
        return ""
    start, end = re.escape(reasoning.start), re.escape(reasoning.end)
    match = re.search(rf"{start}\s*(?:{end}\s*)?\Z", text[-_LONGEST_OPENING:])
    return match.group() if match else ""
