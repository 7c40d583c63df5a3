"""Messages of Anthropic's protocol: their blocks, and the conversation they become."""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from ...models.text.conversation import CacheHint, Message, ToolCall
from ..http.bodies import decode_part
from ..http.failures import APIError
from ..quoting import quote
from .content import Markable, hidden_in, marked, stand_in
from .generation_request import unsupported
from .tools import arguments_text

MAX_BLOCKS = 1000
_RESULT = "tool result"  # where a text stands for a block that is no text
# Claude Code's first line. It differs from request to request; the rest is the same.
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")

Blocks = Annotated[list[Raw], Meta(max_length=MAX_BLOCKS)]


class MessageParam(msgspec.Struct):
    """One message."""

    role: Literal["system", "user", "assistant"]
    content: str | Blocks


class TextBlock(Markable):
    """Text."""

    text: str | None


class ThinkingBlock(msgspec.Struct):
    """Thinking of the assistant: shown, or carried by the signature."""

    thinking: str | None = None
    signature: str | None = None


class IgnoredBlock(msgspec.Struct):
    """Thinking that only Anthropic can read, or a call that ran there, or its result."""


class ToolUseBlock(Markable):
    """A call."""

    id: str
    name: str
    input: Any = None


class ToolResultBlock(Markable):
    """A call's result."""

    tool_use_id: str
    content: str | Blocks | None = None
    is_error: bool | None = None


class ToolReferenceBlock(Markable):
    """A tool that a search has found; the prompt has all tools anyway."""

    tool_name: str


class Citations(msgspec.Struct):
    """Asks for citations in the answer."""

    enabled: bool | None = None


class DocumentBlock(Markable):
    """A document."""

    source: Raw
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class DocumentSource(msgspec.Struct):
    """A document's text."""

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
    """A tool of the request, by its name."""

    type: Literal["tool_reference"]
    name: str


class ToolChangeBlock(msgspec.Struct):
    """Offers a tool from here on, or no longer; the prompt is made of the tools at the end."""

    type: Literal["tool_addition", "tool_removal"]
    tool: ToolReference


Block = (
    TextBlock
    | ThinkingBlock
    | IgnoredBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolReferenceBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolChangeBlock
)
Placed = Sequence[tuple[str, Block]]
"""Blocks, each with its place in the body."""

_TEXTS: dict[str, type[Block]] = {
    "text": TextBlock,
    "document": DocumentBlock,
    "search_result": SearchResultBlock,
}
_CHANGES = dict.fromkeys(("tool_addition", "tool_removal"), ToolChangeBlock)
# Of a session that began at Anthropic.
_HOSTED = (
    *("server_tool_use", "mcp_tool_use", "mcp_tool_result", "advisor_tool_result"),
    *("bash_code_execution_tool_result", "code_execution_tool_result"),
    *("text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("web_fetch_tool_result", "web_search_tool_result"),
)
# The blocks that may stand in a message of a role, or in another block.
_KINDS: dict[str, dict[str, type[Block]]] = {
    "system": {"text": TextBlock, **_CHANGES},
    "user": {**_TEXTS, "tool_result": ToolResultBlock, **_CHANGES},
    "assistant": {
        "text": TextBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": IgnoredBlock,
        "tool_use": ToolUseBlock,
        **dict.fromkeys(_HOSTED, IgnoredBlock),
    },
    _RESULT: {**_TEXTS, "tool_reference": ToolReferenceBlock},
    "document": {"text": TextBlock},
    "search result": {"text": TextBlock},
}


class MessageReader:
    """Reads messages one after the other.

    Attributes:
        messages: of the conversation, so far.
        hints: the cache marks in them.
        removed: names of tools that are not offered any more.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.hints: list[CacheHint] = []
        self.removed: set[str] = set()
        self._turns: list[int] = []  # of each message: number of user turns before it
        self._turn = 0
        self._called: dict[str, str] = {}

    def add(self, raw: Raw, place: str) -> None:
        """Read the next message."""
        message = decode_part(raw, MessageParam, place)
        blocks = _read_blocks(message.content, message.role, f"{place}.content")
        match message.role:
            case "assistant":
                self._assistant(blocks)
            case "user":
                self._user(blocks)
            case "system":
                self.system(_texts_of(self._without_changes(blocks)))

    def system(self, texts: Sequence[tuple[str, bool]]) -> None:
        """Add a system prompt of texts, each with True if it has a cache mark."""
        plain = ((_without_billing(text), is_end) for text, is_end in texts)
        told, ends = marked(plain, between="\n")
        if told:
            self._append(Message(role="system", content=told), ends)

    def keep_thinking(self, turns: int) -> None:
        """Drop reasoning, except that of the last `turns` turns that have any."""
        placed = list(zip(self._turns, self.messages, strict=True))
        kept = sorted({turn for turn, message in placed if message.reasoning})[-turns:]
        for turn, message in placed:
            if turn not in kept:
                message.reasoning = ""

    def _append(self, message: Message, ends: Iterable[int] = ()) -> None:
        index = len(self.messages)
        self.hints += [CacheHint(index, end) for end in ends if end or not message.content]
        self.messages.append(message)
        self._turns.append(self._turn)

    def _assistant(self, blocks: Placed) -> None:
        """Add one message: templates cannot render another order of its parts."""
        calls = [
            ToolCall(id=block.id, name=block.name, arguments=arguments_text(block.input))
            for _, block in blocks
            if isinstance(block, ToolUseBlock)
        ]
        self._called.update({call.id: call.name for call in calls})
        thoughts = [
            block.thinking or hidden_in(block.signature or "")
            for _, block in blocks
            if isinstance(block, ThinkingBlock)
        ]
        texts = [
            ((block.text or "") if isinstance(block, TextBlock) else "", _is_marked(block))
            for _, block in blocks
        ]
        content, ends = marked(texts, between="")
        reasoning = "".join(thoughts)
        message = Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
        self._append(message, ends)

    def _user(self, blocks: Placed) -> None:
        """Add results of calls, and then the user's text."""
        results = [(p, b) for p, b in blocks if isinstance(b, ToolResultBlock)]
        said = [
            (p, b) for p, b in self._without_changes(blocks) if not isinstance(b, ToolResultBlock)
        ]
        self._turn += not results
        for place, result in results:
            message = self._result(place, result)
            self._append(message, [len(message.content)] if _is_marked(result) else [])
        if said or not blocks:
            content, ends = marked(_texts_of(said), between="\n")
            self._append(Message(role="user", content=content), ends)

    def _without_changes(self, blocks: Placed) -> Placed:
        """Follow the blocks that add and remove tools; return the others."""
        for _, block in blocks:
            if isinstance(block, ToolChangeBlock):
                self.removed.discard(block.tool.name)
                if block.type == "tool_removal":
                    self.removed.add(block.tool.name)
        return [(place, block) for place, block in blocks if not isinstance(block, ToolChangeBlock)]

    def _result(self, place: str, result: ToolResultBlock) -> Message:
        called = result.tool_use_id
        if called not in self._called:
            message = (
                f"{place} is the result of a call {quote(called)} that no message before it "
                "asks for; send the assistant's message with that tool_use too"
            )
            raise APIError(400, message, param=f"{place}.tool_use_id")
        text = _text_in(result.content or "", _RESULT, f"{place}.content")
        return Message(
            role="tool",
            content=f"Error: {text}" if result.is_error else text,
            tool_call_id=called,
            name=self._called[called],
        )


class _Kind(msgspec.Struct):
    type: str


def _read_blocks(content: str | list[Raw], where: str, place: str) -> Placed:
    """Read a content that stands in a message or block of the kind `where`."""
    if isinstance(content, str):
        return [(place, TextBlock(content))]
    places = [f"{place}[{index}]" for index in range(len(content))]
    return [(at, _read_block(raw, where, at)) for at, raw in zip(places, content, strict=True)]


def _read_block(raw: Raw, where: str, place: str) -> Block:
    kind = decode_part(raw, _Kind, place).type
    if (known := _KINDS[where].get(kind)) is not None:
        block: Block = decode_part(raw, known, place)
        return block
    if where == _RESULT:
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


def _texts_of(blocks: Placed) -> list[tuple[str, bool]]:
    return [(_text_of(place, block, "user"), _is_marked(block)) for place, block in blocks]


def _text_in(content: str | list[Raw], where: str, place: str) -> str:
    return _joined(_text_of(at, block, where) for at, block in _read_blocks(content, where, place))


def _text_of(place: str, block: Block, where: str) -> str:
    match block:
        case TextBlock(text=text):
            return text or ""
        case ToolReferenceBlock(tool_name=name):
            return name
        case DocumentBlock(title=title, context=context):
            _check_citations(place, block.citations, where)
            text = _document(place, block.source, where)
            if text is None and where != _RESULT:
                # Claude Code looks for the words before the colon, and then goes on without it.
                message = (
                    f"{place} is a document without text, and this model does not support PDF "
                    "input: send the document's text in a source of type text"
                )
                code = "unsupported_parameter"
                raise APIError(400, message, code=code, param=f"{place}.source")
            return _joined([title, context, stand_in("document") if text is None else text])
        case SearchResultBlock(title=title, source=source):
            _check_citations(place, block.citations, where)
            inside = _RESULT if where == _RESULT else "search result"
            return _joined([title, source, _text_in(block.content, inside, f"{place}.content")])
    raise TypeError(f"{block} has no text")


def _document(place: str, raw: Raw, where: str) -> str | None:
    """Read a document's text; None if it has none, such as a PDF."""
    source: DocumentSource = decode_part(raw, DocumentSource, f"{place}.source")
    if source.type == "text" and source.data is not None:
        return source.data
    if source.type == "content" and source.content is not None:
        inside = _RESULT if where == _RESULT else "document"
        return _text_in(source.content, inside, f"{place}.source.content")
    return None


def _check_citations(place: str, citations: Citations | None, where: str) -> None:
    if citations is not None and citations.enabled and where != _RESULT:
        raise unsupported(f"{place}.citations", "leave them out")


def _is_marked(block: Block) -> bool:
    return isinstance(block, Markable) and block.cache_control is not None


def _without_billing(text: str) -> str:
    return text[found.end() :] if (found := _BILLING.match(text)) else text


def _joined(texts: Iterable[str | None]) -> str:
    """Join texts, each on a line of its own."""
    return "\n".join(text for text in texts if text)
