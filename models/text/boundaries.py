"""Where the next turn of a conversation will agree with this one, found by rendering it.

Templates differ: some repeat the whole history, some drop or rewrite the thinking of earlier
turns, some end the generation prompt with tokens that a later turn never shows. So nothing is
counted back from the end; what other renderings have in common with the prompt is compared.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from ..errors import TemplateError
from .conversation import Conversation, Message, ToolCall

_LAST_MESSAGES = 2  # boundaries before these many last messages: they may be edited


class Encode(Protocol):
    """Renders a conversation to tokens as the prompt was made, or raises TemplateError."""

    def __call__(
        self, conversation: Conversation, *, generation_prompt: bool = True
    ) -> Sequence[int]:
        """Render, and encode."""
        ...


class Boundaries(NamedTuple):
    """Offsets in a prompt, in tokens.

    Attributes:
        system: the end of what other conversations share, tools included, or None.
        messages: ends of messages that a next turn keeps, ascending.
    """

    system: int | None
    messages: list[int]


def find(encode: Encode, conversation: Conversation, prompt: Sequence[int]) -> Boundaries:
    """Find the boundaries of a rendered conversation.

    Args:
        encode: as the prompt was made, as `TextCodec.encode_conversation`.
        conversation: its tools and options included.
        prompt: its tokens, rendered with the generation prompt.

    Returns:
        Only offsets greater than 0. What a template refuses to render gives no boundary.
    """
    messages = conversation.messages
    ends = {_common(encode, other, prompt) for other in _next_turns(conversation)}
    for last in range(1, _LAST_MESSAGES + 1):
        if len(messages) > last:
            earlier = _with(conversation, messages[:-last])
            ends.add(_common(encode, earlier, prompt, generation_prompt=False))
    return Boundaries(_system(encode, conversation, prompt), sorted(ends - {0}))


def _next_turns(conversation: Conversation) -> list[Conversation]:
    """The conversation after an answer in words and, with tools, after a call and its result.

    Templates drop the thoughts of a turn that is over, and keep them where a result follows.
    """
    question = Message(role="user", content="2")
    turns = [[Message(role="assistant", content="1"), question]]
    if conversation.tools:
        call = ToolCall(id="call00001", name=conversation.tools[0].name, arguments="{}")
        result = Message(role="tool", content="2", tool_call_id=call.id, name=call.name)
        turns.append([Message(role="assistant", tool_calls=[call]), result])
    return [_with(conversation, [*conversation.messages, *turn]) for turn in turns]


def _system(encode: Encode, conversation: Conversation, prompt: Sequence[int]) -> int | None:
    """The end of the leading system messages and the tools, with what stands around them."""
    messages = conversation.messages
    count = next((i for i, m in enumerate(messages) if m.role != "system"), 0)
    others = (
        _with(conversation, [*messages[:count], Message(role="user", content=text)])
        for text in ("1", "2")
    )
    return min(_common(encode, other, prompt) for other in others) or None


def _with(conversation: Conversation, messages: Sequence[Message]) -> Conversation:
    return msgspec.structs.replace(conversation, messages=list(messages))


def _common(
    encode: Encode,
    conversation: Conversation,
    prompt: Sequence[int],
    *,
    generation_prompt: bool = True,
) -> int:
    """Tokens that another rendering has in common with the prompt, from the first on."""
    try:
        other = encode(conversation, generation_prompt=generation_prompt)
    except TemplateError:
        return 0
    pairs = zip(prompt, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(other)))
