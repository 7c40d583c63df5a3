"""The blocks of Anthropic's messages: which there are, where they may stand, and their text."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from ..http.decoding import decode_part
from ..http.failures import APIError
from ..quoting import quote
from .cache_control import Markable
from .generation_request import unsupported
from .unreadable import stand_in

MAX_BLOCKS = 1000

RESULT = "tool result"
"""Where what is no text is named and not refused."""

Blocks = Annotated[list[Raw], Meta(max_length=MAX_BLOCKS)]


class TextBlock(Markable):
    """Text."""

    text: str | None


class ThinkingBlock(msgspec.Struct):
    """What an assistant thought: shown, or carried by the signature."""

    thinking: str | None = None
    signature: str | None = None


class RedactedBlock(msgspec.Struct):
    """What an assistant thought, encrypted for Anthropic: it says nothing here."""


class HostedBlock(msgspec.Struct):
    """A call that ran at Anthropic, or its result: left out, as the tools that run there are."""


class ToolUseBlock(Markable):
    """A call."""

    id: str
    name: str
    input: Any = None


class ToolResultBlock(Markable):
    """What came of a call."""

    tool_use_id: str
    content: str | Blocks | None = None
    is_error: bool | None = None


class ToolReferenceBlock(Markable):
    """A tool that a search for tools has found; all tools are told of anyway."""

    tool_name: str


class Citations(msgspec.Struct):
    """Whether the answer shall cite."""

    enabled: bool | None = None


class DocumentBlock(Markable):
    """A document."""

    source: Raw
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class DocumentSource(msgspec.Struct):
    """Where a document's text is."""

    type: str
    data: str | None = None
    content: str | Blocks | None = None


class SearchResultBlock(Markable):
    """A text that the client has found."""

    source: str
    title: str
    content: Blocks
    citations: Citations | None = None


class ToolReference(msgspec.Struct):
    """A tool of the request's, by its name."""

    type: Literal["tool_reference"]
    name: str


class ToolAdditionBlock(msgspec.Struct):
    """From here on a tool is offered; it is told of from the start."""

    tool: ToolReference


class ToolRemovalBlock(msgspec.Struct):
    """From here on a tool is not offered."""

    tool: ToolReference


Block = (
    TextBlock
    | ThinkingBlock
    | RedactedBlock
    | HostedBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolReferenceBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
)

_TEXTS: dict[str, type[Block]] = {
    "text": TextBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
_HOSTED = (
    "server_tool_use",
    "mcp_tool_use",
    "mcp_tool_result",
    *(
        f"{name}_tool_result"
        for name in (
            "advisor",
            "bash_code_execution",
            "code_execution",
            "text_editor_code_execution",
            "tool_search",
            "web_fetch",
            "web_search",
        )
    ),
)
"""In the history of a session that began at Anthropic."""
_CHANGES: dict[str, type[Block]] = {
    "tool_addition": ToolAdditionBlock,
    "tool_removal": ToolRemovalBlock,
}
_KINDS: dict[str, dict[str, type[Block]]] = {
    "system": {"text": TextBlock, **_CHANGES},
    "user": {**_TEXTS, "tool_result": ToolResultBlock, **_CHANGES},
    "assistant": {
        "text": TextBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedBlock,
        "tool_use": ToolUseBlock,
        **dict.fromkeys(_HOSTED, HostedBlock),
    },
    RESULT: {**_TEXTS, "tool_reference": ToolReferenceBlock},
    "document": {"text": TextBlock},
    "search result": {"text": TextBlock},
}
"""What may stand where."""


class _Kind(msgspec.Struct):
    type: str


Placed = Sequence[tuple[str, Block]]
"""Blocks, each with its place in the body."""


def read_blocks(content: str | list[Raw], where: str, place: str) -> Placed:
    """Read a content.

    Args:
        content: a text, or blocks.
        where: it stands; a key of `_KINDS`.
        place: of it in the body.

    Raises:
        APIError: 400, naming the block that cannot stand there.
    """
    if isinstance(content, str):
        return [(place, TextBlock(content))]
    return [
        (at, _read_block(raw, where, at))
        for index, raw in enumerate(content)
        for at in [f"{place}[{index}]"]
    ]


def _read_block(raw: Raw, where: str, place: str) -> Block:
    kind = decode_part(raw, _Kind, place).type
    if (known := _KINDS[where].get(kind)) is not None:
        block: Block = decode_part(raw, known, place)
        return block
    if where == RESULT:
        return TextBlock(stand_in(kind))
    if kind == "image":
        # Claude Code looks for the first words, and then goes on without the image.
        message = f"Could not process image: {place} is one, which this model cannot see; send text"
        raise APIError(400, message, code="unsupported_parameter", param=place)
    message = (
        f"{place} is a block of type {quote(kind)}, which is not supported there; "
        f"send {', '.join(_KINDS[where])}"
    )
    raise APIError(400, message, code="unsupported_parameter", param=place)


def texts_of(blocks: Placed) -> list[tuple[str, bool]]:
    """List the texts of blocks that have one, and whether they are marked for the cache.

    Raises:
        APIError: 400, naming what cannot be read.
    """
    return [(_text_of(place, block, "user"), is_marked(block)) for place, block in blocks]


def text_in(content: str | list[Raw], where: str, place: str) -> str:
    """Read a content that is text; see `read_blocks`."""
    blocks = read_blocks(content, where, place)
    return joined(_text_of(at, block, where) for at, block in blocks)


def is_marked(block: Block) -> bool:
    """Whether a block says that what other requests share ends with it."""
    return isinstance(block, Markable) and block.cache_control is not None


def _text_of(place: str, block: Block, where: str) -> str:
    match block:
        case TextBlock(text=text):
            return text or ""
        case ToolReferenceBlock(tool_name=name):
            return name
        case DocumentBlock():
            if where != RESULT:
                _refuse_citations(place, block.citations)
            text = _document(place, block.source, where)
            if text is None and where != RESULT:
                raise _no_text(place)
            text = stand_in("document") if text is None else text
            return joined([block.title, block.context, text])
        case SearchResultBlock():
            if where != RESULT:
                _refuse_citations(place, block.citations)
            inside = RESULT if where == RESULT else "search result"
            text = text_in(block.content, inside, f"{place}.content")
            return joined([block.title, block.source, text])
    raise TypeError(f"{block} has no text")


def _document(place: str, raw: Raw, where: str) -> str | None:
    """Read a document's text; None if it has none, such as a PDF."""
    source: DocumentSource = decode_part(raw, DocumentSource, f"{place}.source")
    if source.type == "text" and source.data is not None:
        return source.data
    if source.type == "content" and source.content is not None:
        inside = RESULT if where == RESULT else "document"
        return text_in(source.content, inside, f"{place}.source.content")
    return None


def _no_text(place: str) -> APIError:
    # Claude Code looks for the words before the colon, and then goes on without the document.
    message = (
        f"{place} is a document without text, and this model does not support PDF input: send "
        "the document's text in a source of type text"
    )
    return APIError(400, message, code="unsupported_parameter", param=f"{place}.source")


def _refuse_citations(place: str, citations: Citations | None) -> None:
    if citations is not None and citations.enabled:
        raise unsupported(f"{place}.citations", "leave them out")


def joined(texts: Iterable[str | None]) -> str:
    """Put blocks together, each on a line of its own."""
    return "\n".join(text for text in texts if text)
