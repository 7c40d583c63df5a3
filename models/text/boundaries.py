"""Where the next turn of a conversation will agree with this one, found by rendering it.

Templates differ: some repeat the whole history, some drop or rewrite the thinking of earlier
turns, some end the generation prompt with tokens that a later turn never shows. So nothing is
counted back from the end; what other renderings have in common with the prompt is compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import TemplateError
from .codec import Message, TextCodec

_SYSTEM_ROLES = ("system", "developer")
_LAST_MESSAGES = 2  # boundaries before these many last messages: they may be edited


class Boundaries(NamedTuple):
    """Offsets in a prompt, in tokens.

    Attributes:
        system: the end of what other conversations share, or None.
        messages: ends of messages that a next turn keeps, ascending.
    """

    system: int | None
    messages: list[int]


def find(codec: TextCodec, messages: Sequence[Message], prompt: Sequence[int]) -> Boundaries:
    """Find the boundaries of a rendered conversation.

    Args:
        codec: of the model.
        messages: the conversation.
        prompt: its tokens, rendered with the generation prompt.

    Returns:
        Only offsets greater than 0. What a template refuses to render gives no boundary.
    """
    answered = [
        *messages,
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "2"},
    ]
    ends = {_common(codec, answered, prompt)}
    for last in range(1, _LAST_MESSAGES + 1):
        if len(messages) > last:
            ends.add(_common(codec, messages[:-last], prompt, generation_prompt=False))
    return Boundaries(_system(codec, messages, prompt), sorted(ends - {0}))


def _system(codec: TextCodec, messages: Sequence[Message], prompt: Sequence[int]) -> int | None:
    """The end of the leading system messages, with whatever the template puts around them."""
    count = next((i for i, m in enumerate(messages) if m["role"] not in _SYSTEM_ROLES), 0)
    leading = list(messages[:count])
    others = [[*leading, {"role": "user", "content": text}] for text in ("1", "2")]
    return min(_common(codec, other, prompt) for other in others) or None


def _common(
    codec: TextCodec,
    messages: Sequence[Message],
    prompt: Sequence[int],
    *,
    generation_prompt: bool = True,
) -> int:
    """Tokens that another rendering has in common with the prompt, from the first on."""
    try:
        text = codec.render_chat(messages, generation_prompt=generation_prompt)
    except TemplateError:
        return 0
    other = codec.encode(text, special_tokens=False)
    pairs = zip(prompt, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(other)))
