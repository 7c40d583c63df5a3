"""Prompts whose earlier answers are, token for token, what was generated.

A template writes an answer in its own way: other blanks, arguments in another spelling, no
thoughts. And what was generated is seldom what its text would be encoded to. Either ends what a
prompt shares with the last turn's, and so what the cache can give. So the conversation is
rendered with a placeholder for each answer that is remembered, and the answer's own tokens are
put there. A template that drops earlier thoughts, or the blank block before an answer without
them, gets only what follows them.

An answer is put in only if the client sent back what it was sent: its text, up to blanks around
it, its calls, with arguments compared as JSON values, and its thoughts or none at all, as most
clients leave them out. Everything here is pure.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..errors import TemplateError
from .answers import Answer, opening_of
from .codec import TextCodec
from .conversation import Conversation, Message
from .formats import ReasoningFormat


class Miss(NamedTuple):
    """An answer, by its message's index, that the prompt has not as it was generated, and why."""

    message: int
    reason: str


class Prompt(NamedTuple):
    """A prompt's tokens, and which answers in it are not as they were generated."""

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

    Args:
        codec: of the model.
        conversation: its tools and options included.
        answers: by the index of their messages; those of later messages are left out.
        own: as the template renders it, if that is known.
        generation_prompt: the beginning of an answer follows.

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
            texts, put, dropped = _splice(
                codec, conversation, same, own, generation_prompt=generation_prompt
            )
        except _UnlikeError as error:
            misses += [Miss(i, str(error)) for i in same]
        else:
            misses += dropped
            tokens, *encoded = codec.encode_pieces(texts)
            for ids, text in zip(put, encoded, strict=True):
                tokens += [*ids, *text]
    return Prompt(tokens or codec.encode(own, special_tokens=False), sorted(misses))


class _UnlikeError(Exception):
    """Answers cannot be put into a prompt; the message says why."""


def _splice(
    codec: TextCodec,
    conversation: Conversation,
    answers: Mapping[int, Answer],
    own: str,
    *,
    generation_prompt: bool,
) -> tuple[list[str], list[Sequence[int]], list[Miss]]:
    """Put answers where the template puts placeholders.

    Returns:
        Texts, the tokens of the answers between them (one fewer), and what is left out.

    Raises:
        _UnlikeError: the template writes what is around a placeholder in another way.
    """
    mark = secrets.token_hex(8)  # no text foresees it
    messages = list(conversation.messages)
    for i, answer in answers.items():
        thoughts = f"umbel{mark}r{i}e" if answer.thought else ""
        messages[i] = Message(role="assistant", content=f"umbel{mark}c{i}e", reasoning=thoughts)
    told = msgspec.structs.replace(conversation, messages=messages)
    try:
        rest = codec.template.render(told, generation_prompt=generation_prompt)
    except TemplateError as error:
        raise _UnlikeError(f"the template refuses a placeholder: {error}") from error
    texts: list[str] = []
    tokens: list[Sequence[int]] = []
    misses: list[Miss] = []
    seen = 0  # how much of the template's own rendering is known to be the same
    for i, answer in answers.items():
        before, found, rest = rest.partition(f"umbel{mark}c{i}e")
        if not found:
            raise _UnlikeError("the template does not show it")
        plain, shown, _ = before.partition(f"umbel{mark}r{i}e")
        fit = _fit(codec.template.form.reasoning, answer, plain, thoughts=bool(shown))
        at = own.find(fit.head, seen)
        if at < 0 or (at and not texts):
            raise _UnlikeError("the template writes what is around it in another way")
        seen = at + len(fit.head)
        if fit.reason:
            misses.append(Miss(i, fit.reason))
        texts.append(fit.text)
        tokens.append(fit.tokens)
    if not own.endswith(rest) or len(own) - len(rest) < seen:
        raise _UnlikeError("the template writes what follows it in another way")
    return [*texts, rest], tokens, misses


class _Fit(NamedTuple):
    """How an answer is put in behind what the template writes before its placeholder.

    Attributes:
        head: what the template writes before it, thoughts aside.
        text: what the prompt has before it.
        tokens: the answer's, or those behind its thoughts.
        reason: why it is not as it was generated, or empty.
    """

    head: str
    text: str
    tokens: Sequence[int]
    reason: str = ""


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
    """One spelling of a JSON value; 1 and true are two values."""
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
