"""Prompts that hold earlier answers token for token as they were generated.

A template writes an answer in its own way: with other blanks, other spellings, no thoughts. And
generated tokens are seldom those to which their text is encoded. Either ends the prefix that a
prompt shares with the last turn's. So umbel remembers answers, renders a conversation with a
placeholder for each of them, and puts the answer's own tokens there. If a template drops earlier
thoughts, or the empty block of thoughts before an answer without them, only the tokens after the
thoughts are put.

An answer is put only if the client sent back what it received: its text, up to blanks around it,
its calls, with arguments compared as JSON values, and its thoughts or none.
"""

import hashlib
import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import msgspec

from ..errors import TemplateError
from .codec import TextCodec
from .conversation import Conversation, Message, Tool
from .events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from .formats import ReasoningFormat
from .output import OutputParser

_LONGEST_OPENING = 1000  # characters of a template's block of thoughts
_Key = tuple[str, str]


class Answer(NamedTuple):
    """A generated answer, and its parts as a client can send them back."""

    tokens: tuple[int, ...]  # without the token that ended it, and without markup before it
    opening: str  # block of thoughts at the end of its prompt, open or empty
    thought: bool  # it has thoughts
    reasoning: str
    tail: tuple[int, ...]  # tokens after its thoughts; encoded again if a token is part of both
    content: str
    calls: tuple[tuple[str, str], ...]  # names and arguments, as JSON texts

    @property
    def nbytes(self) -> int:
        """About its size in memory."""
        texts = (self.content, self.opening, self.reasoning, *chain.from_iterable(self.calls))
        return 512 + 40 * len(self.tokens) + 4 * sum(map(len, texts))


class AnswerStore:
    """Answers by tenant and key; the least recently used is evicted first. Safe from any thread.

    Args:
        budget: bytes for all tenants together; a larger answer is not kept.

    Attributes:
        nbytes: about the answers' size in memory.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._answers: OrderedDict[_Key, Answer] = OrderedDict()
        self.nbytes = 0
        self._lock = threading.Lock()

    def put(self, tenant: str, key: str, answer: Answer) -> None:
        """Remember an answer; it replaces an older one with the same key."""
        with self._lock:
            self._drop((tenant, key))
            self._answers[tenant, key] = answer
            self.nbytes += answer.nbytes
            while self.nbytes > self._budget:
                self._drop(next(iter(self._answers)))

    def find(self, tenant: str, messages: Sequence[Message]) -> dict[int, Answer]:
        """Find the answers of a conversation, by their messages' indices."""
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
    """Digest of the messages before an answer, without thoughts, which clients may leave out."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self._digest = hashlib.sha256()
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        """Append a message."""
        ids = " ".join(call.id for call in message.tool_calls)
        text = f"{message.role}\0{message.content.strip()}\0{ids}\0"
        self._digest.update(text.encode(errors="replace"))

    def key(self, answer: Message) -> str:
        """Name an answer by the messages before it and its own text or first call."""
        if answer.tool_calls:  # their random ids were sent to the client
            return f"call {answer.tool_calls[0].id}"
        digest = self._digest.copy()
        digest.update(answer.content.strip().encode(errors="replace"))
        return f"text {digest.hexdigest()}"


def read_answer(
    codec: TextCodec, tokens: Sequence[int], tools: Sequence[Tool], prompt: str
) -> Answer | None:
    """Make the record of an answer, from its tokens without the one that ended it.

    `tools` are those whose calls were looked for; none if calls were left in the text. `prompt` is
    the rendered prompt, or the end of it. None for an answer that cannot be put back: its thoughts
    have no end, it ends inside a character, it has special tokens that are no markup, or, in a
    format with headers, it has several messages besides its thoughts.
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
    calls = tuple(zip(names, arguments, strict=True))
    thoughts = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    content = "".join(event.text for event in events if isinstance(event, TextDelta))
    opening = opening_of(reasoning, prompt)
    return Answer(generated, opening, thought, thoughts, tail, content, calls)


def _only_text(text: str, events: Sequence[OutputEvent], header: str) -> int | None:
    """Return where an answer's text begins, if only that follows its thoughts and a header."""
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
    """Return the block of thoughts, open or empty, at the end of a text."""
    if reasoning is None:
        return ""
    start, end = re.escape(reasoning.start), re.escape(reasoning.end)
    match = re.search(rf"{start}\s*(?:{end}\s*)?\Z", text[-_LONGEST_OPENING:])
    return match.group() if match else ""


# -- prompts -------------------------------------------------------------------------------


class Miss(NamedTuple):
    """An answer, by its message's index, that the prompt does not hold as generated, and why."""

    message: int
    reason: str


class Prompt(NamedTuple):
    """A prompt's tokens, and the answers in it that are not as they were generated."""

    tokens: list[int]
    misses: list[Miss]


def encode_prompt(
    codec: TextCodec,
    conversation: Conversation,
    answers: Mapping[int, Answer],
    *,
    own: str | None = None,
    generation_prompt: bool = True,
) -> Prompt:
    """Render a conversation to tokens, with remembered answers as they were generated.

    `answers` are by their messages' indices; those of later messages are ignored. `own` is the
    template's rendering, if it is known.

    Raises:
        TemplateError: as `ChatTemplate.render`.
    """
    template = codec.template
    if own is None:
        own = template.render(conversation, generation_prompt=generation_prompt)
    messages = conversation.messages
    known = {i: a for i, a in sorted(answers.items()) if i < len(messages)}
    same = {i: a for i, a in known.items() if _is_same(messages[i], a)}
    misses = [Miss(i, "the client changed it") for i in known if i not in same]
    tokens: list[int] | None = None
    if same:
        try:
            fits, rest = _splice(
                codec, conversation, same, own, generation_prompt=generation_prompt
            )
        except _UnlikeError as error:
            misses += [Miss(i, str(error)) for i in same]
        else:
            misses += [Miss(i, fit.reason) for i, fit in fits.items() if fit.reason]
            tokens, *encoded = codec.encode_pieces([*(fit.text for fit in fits.values()), rest])
            for fit, text in zip(fits.values(), encoded, strict=True):
                tokens += [*fit.tokens, *text]
    return Prompt(tokens or codec.encode(own, special_tokens=False), sorted(misses))


class _UnlikeError(Exception):
    """Answers cannot be put into a prompt; the message says why."""


class _Fit(NamedTuple):
    """An answer's place after `head`, the text before its placeholder without thoughts."""

    head: str
    text: str  # the prompt's text before it
    tokens: Sequence[int]  # all of the answer's, or those after its thoughts
    reason: str = ""  # why it is not as it was generated, or empty


def _splice(
    codec: TextCodec,
    conversation: Conversation,
    answers: Mapping[int, Answer],
    own: str,
    *,
    generation_prompt: bool,
) -> tuple[dict[int, _Fit], str]:
    """Return how each answer is put in, by its message's index, and the text after the last one.

    Raises:
        _UnlikeError: the template writes the text around a placeholder in another way.
    """
    mark = secrets.token_hex(8)  # no text can predict it
    messages = list(conversation.messages)
    for i, answer in answers.items():
        thoughts = f"umbel{mark}r{i}e" if answer.thought else ""
        messages[i] = Message(role="assistant", content=f"umbel{mark}c{i}e", reasoning=thoughts)
    told = msgspec.structs.replace(conversation, messages=messages)
    try:
        rest = codec.template.render(told, generation_prompt=generation_prompt)
    except TemplateError as error:
        raise _UnlikeError(f"the template refuses a placeholder: {error}") from error
    fits: dict[int, _Fit] = {}
    seen = 0  # characters of the template's own rendering that are known to be the same
    for i, answer in answers.items():
        before, found, rest = rest.partition(f"umbel{mark}c{i}e")
        if not found:
            raise _UnlikeError("the template does not show it")
        plain, shown, _ = before.partition(f"umbel{mark}r{i}e")
        fit = _fit(codec.template.form.reasoning, answer, plain, thoughts=bool(shown))
        at = own.find(fit.head, seen)
        if at < 0 or (at and not fits):
            raise _UnlikeError("the template writes the text before it in another way")
        seen = at + len(fit.head)
        fits[i] = fit
    if not own.endswith(rest) or len(own) - len(rest) < seen:
        raise _UnlikeError("the template writes the text after it in another way")
    return fits, rest


def _fit(reasoning: ReasoningFormat | None, answer: Answer, plain: str, *, thoughts: bool) -> _Fit:
    head = plain.removesuffix(opening_of(reasoning, plain))
    if answer.thought and thoughts:
        return _Fit(head, head + answer.opening, answer.tokens)
    if answer.thought:
        return _Fit(head, plain, answer.tail, "the template drops earlier thoughts")
    if plain != head + answer.opening:
        reason = "the template writes the block of thoughts before it in another way"
        return _Fit(head, plain, answer.tokens, reason)
    return _Fit(head, plain, answer.tokens)


def _is_same(message: Message, answer: Answer) -> bool:
    if message.role != "assistant" or message.content.strip() != answer.content.strip():
        return False
    if message.reasoning and message.reasoning.strip() != answer.reasoning.strip():
        return False
    sent = [(call.name, _value(call.arguments)) for call in message.tool_calls]
    return sent == [(name, _value(arguments)) for name, arguments in answer.calls]


def _value(arguments: str) -> str:
    """Write a JSON value in one spelling; 1 and true differ."""
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
