"""The output items of a response as they come, and the events that tell of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Raw

from ...models.text.events import (
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from ..requests.answer_reader import Delta
from ..requests.logprobs import TokenLogProb, Told, TopLogProb
from .response_items import new_id
from .response_tools import CalledTool
from .signature import sign

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Event = dict[str, Any]
"""An event but for its number."""


class Output:
    """Puts an answer's items together.

    Args:
        called: how the client knows the tools, by the names that the model knows.
        logprobs: whether the text's tokens are told.
        summarized: thoughts stand in their summary, where clients look for it.
        encrypted: thoughts come in `encrypted_content`, too.

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
        self._summarized = summarized
        self._encrypted = encrypted
        self._called = called
        self._logprobs = logprobs
        self._open: _Item | None = None

    def take(self, delta: Delta) -> list[Event]:
        """Add more of the answer; return what is to be told of it."""
        match delta.event:
            case TextDelta(text=text):
                opening, message = self._in_text()
                return [*opening, *message.more(text, delta.tokens)]
            case ReasoningDelta(text=text):
                opening, thought = self._in_reasoning()
                return [*opening, *thought.more(text)]
            case ToolCallStart():
                return self._start_call(delta.event)
            case ToolCallDelta(arguments=arguments):
                return self._open.more(arguments) if self._open else []
            case ToolCallEnd():
                return self._close("completed")

    def end(self, *, complete: bool) -> list[Event]:
        """End the answer. One in which nothing was said has an empty text."""
        events: list[Event] = []
        speaking = self._open is not None and not isinstance(self._open, _Thoughts)
        if complete and not speaking and all(i["type"] == "reasoning" for i in self.items):
            events, _ = self._in_text()
        return events + self._close("completed" if complete else "incomplete")

    def _in_text(self) -> "tuple[list[Event], _Text]":
        """Return the open text, or else open one."""
        if isinstance(self._open, _Text):
            return [], self._open
        text = _Text(self._next, logprobs=self._logprobs)
        return self._open_next(text), text

    def _in_reasoning(self) -> "tuple[list[Event], _Thoughts]":
        """Return the open reasoning, or else open one."""
        if isinstance(self._open, _Thoughts):
            return [], self._open
        kind = _Summary if self._summarized else _Reasoning
        reasoning = kind(self._next, encrypted=self._encrypted)
        return self._open_next(reasoning), reasoning

    def _start_call(self, start: ToolCallStart) -> list[Event]:
        tool = self._called.get(start.name, CalledTool(start.name))
        kind = _CustomCall if tool.custom else _FunctionCall
        return self._open_next(kind(self._next, tool, start.id or new_id("call")))

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
    """An item that is coming.

    Attributes:
        index: its place in the output.
    """

    prefix: str

    def __init__(self, index: int) -> None:
        self.index = index
        self._id = new_id(self.prefix)
        self._texts: list[str] = []

    def opened(self) -> list[Event]:
        """Say that it begins."""
        item = self.item("in_progress")
        return [{"type": "response.output_item.added", "output_index": self.index, "item": item}]

    @abstractmethod
    def more(self, text: str, tokens: list[Told] | None = None) -> list[Event]:
        """Add to it."""

    @abstractmethod
    def closed(self) -> list[Event]:
        """Say that its text is complete."""

    @abstractmethod
    def item(self, status: ItemStatus) -> dict[str, Any]:
        """Write it down."""

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _event(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self._id, "output_index": self.index}
        return {"type": f"response.{kind}", **place, **fields}


class _Text(_Item):
    """A message with one text.

    Its tokens are encoded once, as they come: they have megabytes, stand in four events at the end,
    and would stop the event loop there.
    """

    prefix = "msg"

    def __init__(self, index: int, *, logprobs: bool) -> None:
        super().__init__(index)
        self._encoded = bytearray()
        self._whole = Raw(b"[]")
        self._logprobs = logprobs

    def opened(self) -> list[Event]:
        part = self._event("content_part.added", content_index=0, part=self._part())
        return [*super().opened(), part]

    def more(self, text: str, tokens: list[Told] | None = None) -> list[Event]:
        self._texts.append(text)
        told = msgspec.json.encode([_logprob(one.token) for one in tokens or []])
        if tokens:
            self._encoded += b"," if self._encoded else b""
            self._encoded += told[1:-1]
        return [self._event("output_text.delta", content_index=0, delta=text, logprobs=Raw(told))]

    def closed(self) -> list[Event]:
        self._whole = Raw(b"[" + self._encoded + b"]")
        whole = {"content_index": 0, "text": self._text, "logprobs": self._whole}
        part = self._part()
        return [
            self._event("output_text.done", **whole),
            self._event("content_part.done", content_index=0, part=part),
        ]

    def item(self, status: ItemStatus) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part()]
        about = {"id": self._id, "type": "message", "role": "assistant", "status": status}
        return {**about, "content": content}

    def _part(self) -> dict[str, Any]:
        tokens = {"logprobs": self._whole} if self._logprobs else {}
        return {"type": "output_text", "text": self._text, "annotations": [], **tokens}


class _Thoughts(_Item):
    """What the model thought, as it thought it."""

    prefix = "rs"

    def __init__(self, index: int, *, encrypted: bool) -> None:
        super().__init__(index)
        self._encrypted = encrypted

    def _about(self, status: ItemStatus) -> dict[str, Any]:
        about = {"id": self._id, "type": "reasoning", "status": status}
        if not self._encrypted:
            return about
        return {**about, "encrypted_content": sign(self._text) if self._text else None}


class _Reasoning(_Thoughts):
    """Thoughts as the item's content."""

    def opened(self) -> list[Event]:
        part = self._event("content_part.added", content_index=0, part=self._part())
        return [*super().opened(), part]

    def more(self, text: str, tokens: list[Told] | None = None) -> list[Event]:  # noqa: ARG002
        self._texts.append(text)
        return [self._event("reasoning_text.delta", content_index=0, delta=text)]

    def closed(self) -> list[Event]:
        return [
            self._event("reasoning_text.done", content_index=0, text=self._text),
            self._event("content_part.done", content_index=0, part=self._part()),
        ]

    def item(self, status: ItemStatus) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self._part()]
        return {**self._about(status), "summary": [], "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self._text}


class _Summary(_Thoughts):
    """Thoughts as the item's summary, where clients look for what they show."""

    def opened(self) -> list[Event]:
        part = self._event("reasoning_summary_part.added", summary_index=0, part=self._part())
        return [*super().opened(), part]

    def more(self, text: str, tokens: list[Told] | None = None) -> list[Event]:  # noqa: ARG002
        self._texts.append(text)
        return [self._event("reasoning_summary_text.delta", summary_index=0, delta=text)]

    def closed(self) -> list[Event]:
        return [
            self._event("reasoning_summary_text.done", summary_index=0, text=self._text),
            self._event("reasoning_summary_part.done", summary_index=0, part=self._part()),
        ]

    def item(self, status: ItemStatus) -> dict[str, Any]:
        summary = [] if status == "in_progress" else [self._part()]
        return {**self._about(status), "summary": summary}

    def _part(self) -> dict[str, Any]:
        return {"type": "summary_text", "text": self._text}


class _Call(_Item):
    """A call of a tool."""

    def __init__(self, index: int, tool: CalledTool, call_id: str) -> None:
        super().__init__(index)
        self._tool = tool
        self._call_id = call_id

    def _about(self, kind: str) -> dict[str, Any]:
        namespace = {"namespace": self._tool.namespace} if self._tool.namespace else {}
        about = {"id": self._id, "type": kind, "call_id": self._call_id, "name": self._tool.name}
        return {**about, **namespace}


class _FunctionCall(_Call):
    """A call of a function: its arguments are told as they come."""

    prefix = "fc"

    def more(self, text: str, tokens: list[Told] | None = None) -> list[Event]:  # noqa: ARG002
        self._texts.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def closed(self) -> list[Event]:
        name = self._tool.name
        return [self._event("function_call_arguments.done", name=name, arguments=self._text)]

    def item(self, status: ItemStatus) -> dict[str, Any]:
        return {**self._about("function_call"), "arguments": self._text, "status": status}


class _CustomCall(_Call):
    """A call of a custom tool: its text is inside of arguments, and told at their end."""

    prefix = "ctc"

    def more(self, text: str, tokens: list[Told] | None = None) -> list[Event]:  # noqa: ARG002
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
        return {**self._about("custom_tool_call"), "input": text, "status": status}

    def _input(self) -> str:
        """Read the text out of the arguments; what is not as it was asked for is the text."""
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
