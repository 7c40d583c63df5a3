"""Output items of a response as they come, and the events about them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Raw

from ...models.text.events import (
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from ..requests.answer_reader import Delta, TokenLogProb, Told, TopLogProb
from .content import sign
from .response_items import new_id
from .response_tools import CalledTool

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Event = dict[str, Any]
"""An event without its number."""


class Output:
    """Puts an answer's items together.

    Args:
        called: the client's names of tools, by the model's.
        logprobs: True if the text has its tokens' log-probabilities.
        summarized: True if reasoning stands in its item's summary, where clients look for it.
        encrypted: True if reasoning comes in `encrypted_content` too.

    Attributes:
        items: those that are complete.
    """

    def __init__(
        self,
        called: Mapping[str, CalledTool],
        *,
        logprobs: bool,
        summarized: bool = False,
        encrypted: bool = False,
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self._reasoning = _SUMMARY if summarized else _REASONING
        self._encrypted = encrypted
        self._called = called
        self._logprobs = logprobs
        self._open: _Item | None = None

    def take(self, delta: Delta) -> list[Event]:
        """Add a part of the answer; return the events about it."""
        match delta.event:
            case TextDelta(text=text):
                events = [] if isinstance(self._open, _Message) else self._open_message()
            case ReasoningDelta(text=text):
                events = [] if isinstance(self._open, _Thoughts) else self._open_thoughts()
            case ToolCallStart(name=name, id=call_id):
                tool = self._called.get(name, CalledTool(name))
                kind = _CustomCall if tool.custom else _FunctionCall
                return self._open_next(kind(self._next, tool, call_id or new_id("call")))
            case ToolCallDelta(arguments=text):
                events = []
            case ToolCallEnd():
                return self._close("completed")
        return events + (self._open.more(text, delta.tokens) if self._open else [])

    def end(self, *, complete: bool) -> list[Event]:
        """End the answer; a complete one that has only reasoning gets an empty text."""
        events: list[Event] = []
        has_open = self._open is not None and not isinstance(self._open, _Thoughts)
        if complete and not has_open and all(i["type"] == "reasoning" for i in self.items):
            events = self._open_message()
        return events + self._close("completed" if complete else "incomplete")

    def _open_message(self) -> list[Event]:
        return self._open_next(_Message(self._next, logprobs=self._logprobs))

    def _open_thoughts(self) -> list[Event]:
        return self._open_next(_Thoughts(self._next, self._reasoning, encrypted=self._encrypted))

    def _open_next(self, item: "_Item") -> list[Event]:
        closing = self._close("completed")
        self._open = item
        return [*closing, *item.opened()]

    @property
    def _next(self) -> int:
        """The place of the item after the open one."""
        return len(self.items) + (self._open is not None)

    def _close(self, status: ItemStatus) -> list[Event]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        closing, whole = item.closed(), item.item(status)
        self.items.append(whole)
        done = {"type": "response.output_item.done", "output_index": item.index, "item": whole}
        return [*closing, done]


class _Item(ABC):
    """An item that is being written; `index` is its place in the output."""

    prefix: ClassVar[str]  # of its id

    def __init__(self, index: int) -> None:
        self.index = index
        self._id = new_id(self.prefix)
        self._texts: list[str] = []

    def opened(self) -> list[Event]:
        item = self.item("in_progress")
        return [{"type": "response.output_item.added", "output_index": self.index, "item": item}]

    @abstractmethod
    def more(self, text: str, tokens: list[Told] | None) -> list[Event]: ...

    @abstractmethod
    def closed(self) -> list[Event]: ...

    @abstractmethod
    def item(self, status: ItemStatus) -> dict[str, Any]: ...

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _event(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self._id, "output_index": self.index}
        return {"type": f"response.{kind}", **place, **fields}


class _PartNames(NamedTuple):
    """Names for an item whose text stands in one part: in its events, and of the part."""

    part: str
    text: str
    place: str
    kind: str


_TEXT = _PartNames("content_part", "output_text", "content_index", "output_text")
_REASONING = _PartNames("content_part", "reasoning_text", "content_index", "reasoning_text")
_SUMMARY = _PartNames(
    "reasoning_summary_part", "reasoning_summary_text", "summary_index", "summary_text"
)


class _Parted(_Item):
    """An item whose text stands in one part."""

    def __init__(self, index: int, names: _PartNames) -> None:
        super().__init__(index)
        self._names = names

    def opened(self) -> list[Event]:
        return [*super().opened(), self._part_event("added")]

    def more(self, text: str, tokens: list[Told] | None) -> list[Event]:
        self._texts.append(text)
        names, told = self._names, self._tell(tokens)
        return [self._event(f"{names.text}.delta", **{names.place: 0}, delta=text, **told)]

    def closed(self) -> list[Event]:
        names, told = self._names, self._tell_all()
        whole = self._event(f"{names.text}.done", **{names.place: 0}, text=self._text, **told)
        return [whole, self._part_event("done")]

    def _part_event(self, name: str) -> Event:
        names = self._names
        return self._event(f"{names.part}.{name}", **{names.place: 0}, part=self._part())

    def _part(self) -> dict[str, Any]:
        return {"type": self._names.kind, "text": self._text}

    def _parts(self, status: ItemStatus) -> list[dict[str, Any]]:
        return [] if status == "in_progress" else [self._part()]

    def _tell(self, tokens: list[Told] | None) -> dict[str, Any]:  # noqa: ARG002
        """Return what a delta has beside its text."""
        return {}

    def _tell_all(self) -> dict[str, Any]:
        """Return what the end of the text has beside it."""
        return {}


class _Message(_Parted):
    """A message with one text.

    Its tokens are encoded once, as they come: they have megabytes, stand in four events at the end,
    and would stop the event loop there.
    """

    prefix = "msg"

    def __init__(self, index: int, *, logprobs: bool) -> None:
        super().__init__(index, _TEXT)
        self._encoded = bytearray()
        self._whole = Raw(b"[]")
        self._logprobs = logprobs

    def item(self, status: ItemStatus) -> dict[str, Any]:
        about = {"id": self._id, "type": "message", "role": "assistant", "status": status}
        return {**about, "content": self._parts(status)}

    def _tell(self, tokens: list[Told] | None) -> dict[str, Any]:
        told = msgspec.json.encode([_logprob(one.token) for one in tokens or []])
        if tokens:
            self._encoded += b"," if self._encoded else b""
            self._encoded += told[1:-1]
        return {"logprobs": Raw(told)}

    def _tell_all(self) -> dict[str, Any]:
        self._whole = Raw(b"[" + self._encoded + b"]")
        return {"logprobs": self._whole}

    def _part(self) -> dict[str, Any]:
        tokens = {"logprobs": self._whole} if self._logprobs else {}
        return {**super()._part(), "annotations": [], **tokens}


class _Thoughts(_Parted):
    """Reasoning, as the item's content or as its summary."""

    prefix = "rs"

    def __init__(self, index: int, names: _PartNames, *, encrypted: bool) -> None:
        super().__init__(index, names)
        self._encrypted = encrypted

    def item(self, status: ItemStatus) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id, "type": "reasoning", "status": status}
        if self._encrypted:
            item["encrypted_content"] = sign(self._text) if self._text else None
        if self._names is _SUMMARY:
            return {**item, "summary": self._parts(status)}
        return {**item, "summary": [], "content": self._parts(status)}


class _Call(_Item):
    """A call of a tool."""

    kind: ClassVar[str]

    def __init__(self, index: int, tool: CalledTool, call_id: str) -> None:
        super().__init__(index)
        self._tool = tool
        self._call_id = call_id

    def _about(self) -> dict[str, Any]:
        namespace = {"namespace": self._tool.namespace} if self._tool.namespace else {}
        about = {"type": self.kind, "call_id": self._call_id, "name": self._tool.name}
        return {"id": self._id, **about, **namespace}


class _FunctionCall(_Call):
    """A call of a function; its arguments are sent as they come."""

    prefix, kind = "fc", "function_call"

    def more(self, text: str, tokens: list[Told] | None) -> list[Event]:  # noqa: ARG002
        self._texts.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def closed(self) -> list[Event]:
        name = self._tool.name
        return [self._event("function_call_arguments.done", name=name, arguments=self._text)]

    def item(self, status: ItemStatus) -> dict[str, Any]:
        return {**self._about(), "arguments": self._text, "status": status}


class _CustomCall(_Call):
    """A call of a custom tool; its text stands inside arguments, and is sent at their end."""

    prefix, kind = "ctc", "custom_tool_call"

    def more(self, text: str, tokens: list[Told] | None) -> list[Event]:  # noqa: ARG002
        self._texts.append(text)
        return []

    def closed(self) -> list[Event]:
        text = self._input()
        return [
            self._event("custom_tool_call_input.delta", delta=text),
            self._event("custom_tool_call_input.done", input=text),
        ]

    def item(self, status: ItemStatus) -> dict[str, Any]:
        text = "" if status == "in_progress" else self._input()
        return {**self._about(), "input": text, "status": status}

    def _input(self) -> str:
        """Read the text out of the arguments; malformed arguments are the text."""
        try:
            found = msgspec.json.decode(self._text)
        except msgspec.DecodeError:
            return self._text
        if isinstance(found, dict) and list(found) == ["input"] and isinstance(found["input"], str):
            return found["input"]
        return self._text


def _logprob(token: TokenLogProb) -> dict[str, Any]:
    return {**_likely(token), "top_logprobs": [_likely(other) for other in token.top_logprobs]}


def _likely(token: TopLogProb) -> dict[str, Any]:
    # Clients take no null here; a special token writes nothing.
    return {"token": token.token, "logprob": token.logprob, "bytes": token.bytes or []}
