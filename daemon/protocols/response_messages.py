"""A response's items become the messages of a conversation, and what a store keeps of them."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import structlog
from msgspec import Raw

from ...models.text.conversation import Message, ToolCall
from ..http.decoding import decode_part
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check
from .response_items import (
    HOSTED,
    MAX_ITEMS,
    InputItem,
    custom_arguments,
    internal_name,
    new_id,
    unsupported_kind,
)
from .signature import hidden_in
from .tools import arguments_text
from .unreadable import stand_in

log = structlog.get_logger()

MAX_REFERRED = 16 * 1024 * 1024
"""Bytes of stored items that one request may take up by their ids."""

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
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


class ReadItems(NamedTuple):
    """What was read.

    Attributes:
        messages: of the conversation.
        kept: the JSON of each item, with type and id, as a store keeps it.
    """

    messages: list[Message]
    kept: list[bytes]


def read_items(
    past: Sequence[bytes], raws: Sequence[Raw], find: FindItem, check: Check
) -> ReadItems:
    """Read items to messages, one by one.

    Args:
        past: the items of the responses before, which were read once.
        raws: the input's items.
        find: looks up items that are referred to.
        check: called between two items.

    Raises:
        APIError: 400 or 404, naming what is wrong.
    """
    if len(past) + len(raws) > MAX_ITEMS:
        message = f"the input and what it goes on with have over {MAX_ITEMS} items; send fewer"
        raise APIError(400, message, param="input")
    messages = _Messages()
    for body in past:
        check()
        messages.add(decode_part(Raw(body), InputItem, _PAST), _PAST)
    kept, referred, left_out = [], _Referred(find), set[str]()
    for index, raw in enumerate(raws):
        check()
        place = f"input[{index}]"
        item = decode_part(raw, InputItem, place)
        if item.type == "item_reference":
            item = decode_part(Raw(referred.find(item.id, place)), InputItem, place)
        if item.type in HOSTED:
            left_out.add(item.type)
            continue
        messages.add(item, place)
        kept.append(_kept(item))
    if left_out:
        log.info("hosted items left out", types=",".join(sorted(left_out)))
    return ReadItems(messages.end(), kept)


class _Referred:
    """Finds the items that are referred to, each once, within a bound of bytes."""

    def __init__(self, find: FindItem) -> None:
        self._find = find
        self._found: dict[str, bytes | None] = {}
        self._nbytes = 0

    def find(self, name: str | None, place: str) -> bytes:
        """Return the JSON of an item.

        Raises:
            APIError: 404, it is not stored; 400, it is too much.
        """
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
    """Write an item as it is listed later; texts are written out as parts."""
    item.type = item.type or "message"
    item.id = item.id or new_id(_PREFIXES[item.type])
    if item.type == "message" and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        more: dict[str, Any] = {"annotations": []} if item.role == "assistant" else {}
        item.content = [{"type": kind, "text": item.content, **more}]
    return msgspec.json.encode(item)


class _Messages:
    """Builds messages. What an answer consists of, one item each, becomes one message again."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: _Turn | None = None
        self._called: dict[str, str] = {}

    def add(self, item: InputItem, place: str) -> None:
        """Take the next item.

        Raises:
            APIError: 400, naming what it lacks.
        """
        match item.type or "message":
            case "message":
                self._message(item, place)
            case "reasoning":
                self._assistant().thoughts.append(_reasoning_of(item, place))
            case "function_call":
                item.arguments = arguments_text(item.arguments)
                self._call(item, item.arguments, place)
            case "custom_tool_call":
                self._call(item, custom_arguments(_needed(item, "input", place)), place)
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, place)
            case _:
                raise unsupported_kind(place, item.type, "leave it out")

    def end(self) -> list[Message]:
        """Return all messages."""
        self._end_turn()
        return self.messages

    def _message(self, item: InputItem, place: str) -> None:
        role, text = _needed(item, "role", place), _text_of(item, "content", place)
        if role == "assistant":
            if self._turn is not None and self._turn.text_is_last:
                self._end_turn()  # two texts in a row are two answers
            self._assistant().texts.append(text)
            self._assistant().text_is_last = True
            return
        self._end_turn()
        # Templates know "system"; "developer" is OpenAI's newer name for the same voice.
        known: Literal["system", "user"] = "user" if role == "user" else "system"
        self.messages.append(Message(role=known, content=text))

    def _call(self, item: InputItem, arguments: str, place: str) -> None:
        call_id = _needed(item, "call_id", place)
        name = internal_name(_needed(item, "name", place), item.namespace)
        self._assistant().calls.append(ToolCall(id=call_id, name=name, arguments=arguments))
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
        self._end_turn()
        self.messages.append(Message(role="tool", content=text, tool_call_id=call_id, name=name))

    def _assistant(self) -> "_Turn":
        """Return the answer that is being put together; more of it comes."""
        if self._turn is None:
            self._turn = _Turn()
        self._turn.text_is_last = False
        return self._turn

    def _end_turn(self) -> None:
        if self._turn is not None:
            self.messages.append(self._turn.message())
            self._turn = None


class _Turn:
    """An answer that is being put together."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[ToolCall] = []
        self.text_is_last = False

    def message(self) -> Message:
        texts, thoughts = "".join(self.texts), "".join(self.thoughts)
        return Message(role="assistant", content=texts, reasoning=thoughts, tool_calls=self.calls)


def _text_of(item: InputItem, field: Literal["content", "output"], place: str) -> str:
    """Join the parts of a field; in a tool's output those that are no text are named.

    Raises:
        APIError: 400, it is missing, or content has a part that is no text.
    """
    content: str | list[dict[str, Any]] | dict[str, Any] | None = getattr(item, field)
    if content is None:
        raise _missing(item, field, place)
    if isinstance(content, str):
        return content
    texts = []
    for part in [content] if isinstance(content, dict) else content:
        kind = part.get("type")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind in _TEXT_PARTS and isinstance(text, str):
            texts.append(text)
        elif field == "output":
            texts.append(stand_in(kind))
        else:
            message = (
                f"{place} has a part of type {quote(kind)}, which this model cannot read; send text"
            )
            raise APIError(400, message, param=f"{place}.{field}")
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
    """Read what was thought: the reasoning itself, or else what a client kept of it."""
    if hidden := hidden_in(item.encrypted_content or ""):
        return hidden
    content = item.content or item.summary or []
    if isinstance(content, str):
        return content
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise APIError(400, f"{place} has reasoning that is no text", param=f"{place}.content")
    return "".join(str(text) for text in texts)
