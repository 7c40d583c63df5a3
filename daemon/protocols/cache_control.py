"""`cache_control`: where, says a client, ends what its other requests will have too."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec


class CacheControl(msgspec.Struct):
    """A mark. What else it may have, such as `ttl`, changes nothing: state stays while it fits."""

    type: Literal["ephemeral"]


class Markable(msgspec.Struct, kw_only=True):
    """A part of a body that can be marked."""

    cache_control: CacheControl | None = None


class MarkedText(NamedTuple):
    """A text.

    Attributes:
        text: all of it.
        ends: where the blocks in it end that are marked for the cache.
    """

    text: str
    ends: list[int]


def marked(texts: Iterable[tuple[str, bool]], *, between: str) -> MarkedText:
    """Put texts together, but for empty ones, and note where those end that are marked.

    Args:
        texts: each with whether it is marked.
        between: what stands between two of them.
    """
    parts: list[str] = []
    ends, length = [], 0
    for text, is_end in texts:
        if text:
            length += len(text) + (len(between) if parts else 0)
            parts.append(text)
        if is_end:
            ends.append(length)
    return MarkedText(between.join(parts), ends)
