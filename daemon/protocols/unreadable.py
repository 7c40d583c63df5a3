"""Parts that are no text, which a model that reads text only cannot take.

In a user's message they are refused. In a tool's result a text stands for them: an agent sends its
history with every request, and a refusal would end the conversation for good.
"""

from ..quoting import quote

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


def stand_in(kind: object) -> str:
    """Say in a tool's result what a part of this type is."""
    words = _STAND_INS.get(kind) if isinstance(kind, str) else None
    return words or f"[a part of type {quote(kind)}; this model cannot read it]"
