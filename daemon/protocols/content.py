"""Content of messages in all protocols: cache marks, parts without text, hidden reasoning."""

from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from ..quoting import quote

_HIDDEN = "umbel."
# A model that reads text only cannot take these parts. A user's are refused. A tool's result gets
# a text instead: an agent sends its history with every request, and a refusal would end the
# conversation for good.
_STAND_INS = {
    **dict.fromkeys(("image", "image_url", "input_image"), "[an image; this model cannot see it]"),
    **dict.fromkeys(
        ("document", "file", "input_file"), "[a document, such as a PDF; this model cannot read it]"
    ),
    **dict.fromkeys(
        ("audio", "audio_url", "input_audio"), "[a recording; this model cannot hear it]"
    ),
    **dict.fromkeys(("video", "video_url", "input_video"), "[a video; this model cannot see it]"),
}


class CacheControl(msgspec.Struct):
    """A cache mark: other requests share the prompt up to here. Its `ttl` changes nothing."""

    type: Literal["ephemeral"]


class Markable(msgspec.Struct, kw_only=True):
    """A part of a body that may have a cache mark."""

    cache_control: CacheControl | None = None


class MarkedText(NamedTuple):
    """A text with the offsets, in characters, where blocks with a cache mark end."""

    text: str
    ends: list[int]


def marked(texts: Iterable[tuple[str, bool]], *, between: str) -> MarkedText:
    """Join texts, without the empty ones, and note where the marked ones end.

    Args:
        texts: pairs of a text and True if it has a cache mark.
        between: stands between two texts.
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


def stand_in(kind: object) -> str:
    """Return the text that stands for a part of this type in a tool's result."""
    words = _STAND_INS.get(kind) if isinstance(kind, str) else None
    return words or f"[a part of type {quote(kind)}; this model cannot read it]"


def sign(hidden: str = "") -> str:
    """Make a signature that carries reasoning which the client does not see.

    A message's `signature` and a response's `encrypted_content` have it, and clients send them
    back: the next prompt then has what the model thought. A signature proves nothing.
    """
    return _HIDDEN + b64encode(hidden.encode()).decode()


def hidden_in(signature: str) -> str:
    """Read the reasoning in a signature; empty if it is another server's."""
    if not signature.startswith(_HIDDEN):
        return ""
    try:
        return b64decode(signature.removeprefix(_HIDDEN), validate=True).decode()
    except ValueError:
        return ""
