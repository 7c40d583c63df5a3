"""Items of OpenAI's responses: the conversation they become, and what a store keeps of them."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import structlog
from msgspec import Meta, Raw

from ...models.text.conversation import Message, ToolCall
from ..http.bodies import decode_part, decode_parts
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check
from .chat import Parts, no_text, text_of
from .content import hidden_in, stand_in
from .tools import arguments_text

log = structlog.get_logger()

MAX_ITEMS = 10_000
MAX_REFERRED = 16 * 1024 * 1024
"""Bytes of stored items that one request may take up by their ids."""

# Of tools that are left out, in a conversation that began elsewhere.
_HOSTED = frozenset(
    {
        *("apply_patch_call", "apply_patch_call_output", "code_interpreter_call"),
        *("computer_call", "computer_call_output", "file_search_call", "image_generation_call"),
        *("local_shell_call", "local_shell_call_output", "mcp_approval_request"),
        *("mcp_approval_response", "mcp_call", "mcp_list_tools", "shell_call"),
        *("shell_call_output", "tool_search_call", "tool_search_output", "web_search_call"),
    }
)
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_PAST = "previous_response_id"

FindItem = Callable[[str], bytes | None]
"""Looks up the JSON of an item by its id."""

Id = Annotated[str, Meta(min_length=1, max_length=256)]


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One item of any kind; its `type` says which fields it has."""

    type: str | None = None
    id: Id | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | None = None
    call_id: Id | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    output: str | Parts | dict[str, Any] | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None


class ReadItems(NamedTuple):
    """Items that were read.

    Attributes:
        messages: of the conversation.
        kept: the JSON of each item of the input, with type and id, as a store keeps it.
    """

    messages: list[Message]
    kept: list[bytes]


def new_id(prefix: str) -> str:
    """Make an id that is sent to a client."""
    return f"{prefix}_{secrets.token_hex(24)}"


def internal_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool: it knows no namespaces."""
    return f"{namespace}__{name}" if namespace else name


def unsupported_kind(place: str, kind: str | None, advice: str) -> APIError:
    """Make the error for an item or a tool of an unknown type."""
    message = f"{place} of type {quote(kind)} is not supported; {advice}"
    return APIError(400, message, code="unsupported_parameter", param=place)


def split_input(raw: Raw) -> list[Raw]:
    """Split the input into its items; a text is a user's message. 413 for a text too large."""
    first = bytes(memoryview(raw)[:1])
    if first == b"[":
        return decode_parts(raw, MAX_ITEMS, "input")
    text = decode_part(raw, str, "input") if first == b'"' else None
    if text is None:
        decode_part(raw, str | list[Any], "input")
        raise APIError(400, "input is empty; send a text, or a list of items", param="input")
    item = InputItem(type="message", role="user", content=[{"type": "input_text", "text": text}])
    return [Raw(msgspec.json.encode(item))]


def read_items(
    past: Sequence[bytes], raws: Sequence[Raw], find: FindItem, check: Check
) -> ReadItems:
    """Read items to messages, one by one.

    Args:
        past: the items of earlier responses, which were read once.
        raws: the input's items.
        find: looks up items that are referred to.
        check: called between two items; raises what ends the work.

    Raises:
        APIError: 400; 404 for an item that is not stored.
    """
    if len(past) + len(raws) > MAX_ITEMS:
        message = f"the input and what it goes on with have over {MAX_ITEMS} items; send fewer"
        raise APIError(400, message, param="input")
    messages = _Messages()
    for body in past:
        check()
        messages.add(decode_part(Raw(body), InputItem, _PAST), _PAST)
    kept, stored, left_out = [], _StoredItems(find), set[str]()
    for index, raw in enumerate(raws):
        check()
        place = f"input[{index}]"
        item = decode_part(raw, InputItem, place)
        if item.type == "item_reference":
            item = decode_part(Raw(stored.find(item.id, place)), InputItem, place)
        if item.type in _HOSTED:
            left_out.add(item.type)
            continue
        messages.add(item, place)
        kept.append(_kept(item))
    if left_out:
        log.info("hosted items left out", types=",".join(sorted(left_out)))
    return ReadItems(messages.end(), kept)


class _StoredItems:
    """Finds items that are referred to, each once, within a bound of bytes."""

    def __init__(self, find: FindItem) -> None:
        self._find = find
        self._found: dict[str, bytes | None] = {}
        self._nbytes = 0

    def find(self, name: str | None, place: str) -> bytes:
        if name is not None and name not in self._found:
            self._found[name] = self._find(name)
        body = self._found.get(name or "")
        if body is None:
            message = f"{place} refers to an item {quote(name)} that is not stored; send the item"
            raise APIError(404, message, code="item_not_found", param=place)
        self._nbytes += len(body)
        if self._nbytes > MAX_REFERRED:
            message = f"{place}: the items referred to have over {MAX_REFERRED // 2**20} MiB"
            raise APIError(400, message, param=place)
        return body


def _kept(item: InputItem) -> bytes:
    """Write an item as it is listed later; texts become parts."""
    item.type = item.type or "message"
    item.id = item.id or new_id(_PREFIXES[item.type])
    if item.type == "message" and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if item.role == "assistant" else {}
        item.content = [{"type": kind, "text": item.content, **more}]
    return msgspec.json.encode(item)


@dataclass
class _Answer:
    """An assistant's message that is being put together of items."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    ends_in_text: bool = False


class _Messages:
    """Builds messages. The items of one answer become one message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._answer: _Answer | None = None
        self._called: dict[str, str] = {}

    def add(self, item: InputItem, place: str) -> None:
        """Take the next item."""
        match item.type or "message":
            case "message":
                self._message(item, place)
            case "reasoning":
                self._open_answer().thoughts.append(_reasoning_of(item, place))
            case "function_call":
                item.arguments = arguments_text(item.arguments)
                self._call(item, item.arguments, place)
            case "custom_tool_call":
                # A custom tool is a function of one text here.
                text = {"input": _needed(item, "input", place)}
                self._call(item, msgspec.json.encode(text).decode(), place)
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, place)
            case _:
                raise unsupported_kind(place, item.type, "leave it out")

    def end(self) -> list[Message]:
        """Return all messages."""
        self._end_answer()
        return self._messages

    def _message(self, item: InputItem, place: str) -> None:
        role, text = _needed(item, "role", place), _text_of(item, "content", place)
        if role == "assistant":
            if self._answer is not None and self._answer.ends_in_text:
                self._end_answer()  # two texts in a row are two answers
            answer = self._open_answer()
            answer.texts.append(text)
            answer.ends_in_text = True
            return
        self._end_answer()
        # Templates know "system"; "developer" is OpenAI's newer name for it.
        known: Literal["system", "user"] = "user" if role == "user" else "system"
        self._messages.append(Message(role=known, content=text))

    def _call(self, item: InputItem, arguments: str, place: str) -> None:
        call_id = _needed(item, "call_id", place)
        name = internal_name(_needed(item, "name", place), item.namespace)
        self._open_answer().calls.append(ToolCall(id=call_id, name=name, arguments=arguments))
        self._called[call_id] = name

    def _output(self, item: InputItem, place: str) -> None:
        call_id = _needed(item, "call_id", place)
        if call_id not in self._called:
            message = (
                f"{place} is the output of a call {quote(call_id)} that no item before it asks "
                "for; send the item with that call too, or previous_response_id"
            )
            raise APIError(400, message, param=f"{place}.call_id")
        text, name = _text_of(item, "output", place), self._called[call_id]
        self._end_answer()
        self._messages.append(Message(role="tool", content=text, tool_call_id=call_id, name=name))

    def _open_answer(self) -> _Answer:
        self._answer = self._answer or _Answer()
        self._answer.ends_in_text = False
        return self._answer

    def _end_answer(self) -> None:
        if (answer := self._answer) is not None:
            self._messages.append(
                Message(
                    role="assistant",
                    content="".join(answer.texts),
                    reasoning="".join(answer.thoughts),
                    tool_calls=answer.calls,
                )
            )
            self._answer = None


def _text_of(item: InputItem, field: Literal["content", "output"], place: str) -> str:
    """Join the parts of a field; in a tool's output, words stand for those that are no text."""
    content: str | list[dict[str, Any]] | dict[str, Any] | None = getattr(item, field)
    if content is None:
        raise _missing(item, field, place)
    if isinstance(content, str):
        return content
    texts = []
    for part in [content] if isinstance(content, dict) else content:
        text = text_of(part)
        if text is None and field == "content":
            raise no_text(part, place, field)
        texts.append(stand_in(part.get("type")) if text is None else text)
    return "".join(texts)


def _needed(item: InputItem, field: Literal["role", "call_id", "name", "input"], place: str) -> str:
    value: str | None = getattr(item, field)
    if value is None:
        raise _missing(item, field, place)
    return value


def _missing(item: InputItem, field: str, place: str) -> APIError:
    message = f"{place} of type {quote(item.type or 'message')} needs {field}"
    return APIError(400, message, param=f"{place}.{field}")


def _reasoning_of(item: InputItem, place: str) -> str:
    """Read reasoning: the form that clients keep without reading it, or the text itself."""
    if hidden := hidden_in(item.encrypted_content or ""):
        return hidden
    content = item.content or item.summary or []
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise APIError(400, f"{place} has reasoning that is no text", param=f"{place}.content")
    return "".join(str(text) for text in texts)
