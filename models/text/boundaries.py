"""Positions up to which other prompts will agree with a conversation's, found by rendering.

Templates differ: some repeat the whole history, some drop or rewrite earlier thoughts, some end the
generation prompt with tokens that later turns lack. So boundaries are not counted from the end:
they are the common prefixes of the prompt and of other renderings.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..errors import TemplateError
from .conversation import CacheHint, Conversation, Message, ToolCall

_LAST_MESSAGES = 2  # that may be edited: each gets a boundary before it
MAX_HINTS = 4
"""Hints of one conversation that are used: each may cost a rendering."""


Encode = Callable[..., Sequence[int]]
"""Renders a conversation to tokens, as `TextCodec.encode_conversation` does."""


class Boundaries(NamedTuple):
    """Offsets in a prompt, in tokens; lists are ascending."""

    system: int | None  # end of the part that other conversations share, tools included
    messages: list[int]  # ends of messages that a next turn keeps
    hints: list[int]  # further positions that the client names


def find(encode: Encode, conversation: Conversation, prompt: Sequence[int]) -> Boundaries:
    """Find the boundaries of a conversation whose prompt ends with the generation prompt.

    Offsets are greater than 0. A rendering that the template refuses gives no boundary.
    """
    messages = conversation.messages
    turn = {_common(encode, other, prompt) for other in _next_turns(conversation)}
    ends = {}  # by message index
    for last in range(1, _LAST_MESSAGES + 1):
        if len(messages) > last:
            earlier = _with(conversation, messages[:-last])
            end = _common(encode, earlier, prompt, generation_prompt=False)
            ends[len(messages) - 1 - last] = end
    others = (  # conversations that share only the leading system messages and the tools
        _with(conversation, [*messages[: _leading(messages)], Message(role="user", content=text)])
        for text in ("1", "2")
    )
    system = min(_common(encode, other, prompt) for other in others) or None
    hints = {
        _hint(encode, conversation, prompt, hint, ends)
        for hint in list(dict.fromkeys(conversation.hints))[:MAX_HINTS]
        if not _is_known(conversation, hint)
    }
    hints -= {0, system, *turn}
    return Boundaries(system, sorted((turn | set(ends.values())) - {0}), sorted(hints))


def _next_turns(conversation: Conversation) -> list[Conversation]:
    """Append a text answer and, with tools, a call and its result.

    Templates drop thoughts of a finished turn, and keep them before a result.
    """
    question = Message(role="user", content="2")
    turns = [[Message(role="assistant", content="1"), question]]
    if conversation.tools:
        call = ToolCall(id="call00001", name=conversation.tools[0].name, arguments="{}")
        result = Message(role="tool", content="2", tool_call_id=call.id, name=call.name)
        turns.append([Message(role="assistant", tool_calls=[call]), result])
    return [_with(conversation, [*conversation.messages, *turn]) for turn in turns]


def _leading(messages: Sequence[Message]) -> int:
    return next((i for i, m in enumerate(messages) if m.role != "system"), 0)


def _is_known(conversation: Conversation, hint: CacheHint) -> bool:
    """True if a hint stands at the end of the prompt, or of the part that all prompts share."""
    messages, leading = conversation.messages, _leading(conversation.messages)
    if hint.message is None:
        return leading == 0 and hint.end >= len(conversation.tools)
    ends = hint.message in (leading - 1, len(messages) - 1)
    return ends and not _is_inside(conversation, hint)


def _is_inside(conversation: Conversation, hint: CacheHint) -> bool:
    index = hint.message
    return index is not None and bool(conversation.messages[index].content[hint.end :].strip())


def _hint(
    encode: Encode,
    conversation: Conversation,
    prompt: Sequence[int],
    hint: CacheHint,
    ends: Mapping[int, int],
) -> int:
    """Find a hint's offset, by one rendering at most."""
    known = None if hint.message is None else ends.get(hint.message)
    if known is not None and not _is_inside(conversation, hint):
        return known
    other = _parting(conversation, hint)
    return _common(encode, other, prompt, generation_prompt=False)


def _parting(conversation: Conversation, hint: CacheHint) -> Conversation:
    """Write a conversation that agrees with another up to a hint, and has little after it."""
    messages = conversation.messages
    index = hint.message
    if index is None:
        return _parting_tools(conversation, hint.end)
    last = messages[index]
    if _is_inside(conversation, hint):
        text = last.content[: hint.end]
        content = text + _unlike(last.content[hint.end :])
        last = msgspec.structs.replace(last, content=content)
    kept = [*messages[:index], last]
    # Templates write turns before the last user message in another way.
    if any(message.role == "user" for message in messages[index + 1 :]):
        kept.append(Message(role="user", content=_unlike(messages[index + 1].content)))
    return _with(conversation, kept)


def _parting_tools(conversation: Conversation, count: int) -> Conversation:
    """Keep the first tools only, or all of them with another system prompt."""
    leading = conversation.messages[: _leading(conversation.messages)]
    if count >= len(conversation.tools) and leading:
        leading = [Message(role="system", content=_unlike(leading[0].content))]
    tools = conversation.tools[:count]
    messages = [*leading, Message(role="user", content="1")]
    return msgspec.structs.replace(conversation, messages=messages, tools=tools)


def _unlike(text: str) -> str:
    """Return a text that differs from another in its first character."""
    return "2" if text.lstrip().startswith("1") else "1"


def _with(conversation: Conversation, messages: Sequence[Message]) -> Conversation:
    return msgspec.structs.replace(conversation, messages=list(messages))


def _common(
    encode: Encode,
    conversation: Conversation,
    prompt: Sequence[int],
    *,
    generation_prompt: bool = True,
) -> int:
    """Count the tokens that another rendering shares with the prompt, from the first on."""
    try:
        other = encode(conversation, generation_prompt=generation_prompt)
    except TemplateError:
        return 0
    pairs = zip(prompt, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(other)))
