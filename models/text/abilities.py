"""Abilities of a chat template, found by rendering conversations made for that."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import TemplateError
from .calls import MalformedCallError, read_calls
from .conversation import Tool, ToolCall
from .formats import OutputFormat, ToolFormat
from .json_text import JsonSpan
from .tools import native_call, openai_tools

_JSON_BEGINS = re.compile(r"[{\[]\s*[\"{]")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


Render = Callable[..., str]
"""Renders message dicts with the model's own template, as `TextCodec.render_chat` does."""


class Abilities(NamedTuple):
    """Properties of a template on which the form of messages depends."""

    tools: bool  # it describes tools, and writes calls that mlx-lm can read
    call_text: str  # a call in its form, with markers; empty if it writes none
    any_id: bool  # a call's id may be any text, not only nine letters and digits
    arguments_as_text: bool  # it takes a call's arguments as JSON text, and keeps that
    several_calls: bool  # it writes all calls of a message, not only the first
    content_beside_thoughts: bool  # a message may have thoughts, content and a call
    reasoning_key: str  # the key of earlier thoughts in a message
    system: bool  # it takes a system message at the beginning
    late_system: bool  # and at any other place, also several in a row
    user_twice: bool  # user messages may follow each other
    assistant_twice: bool  # assistant messages may follow each other
    assistant_first: bool  # an assistant message may stand before all user messages
    thinking_switch: bool  # `enable_thinking` changes the prompt


def in_parts(render: Render) -> Render:
    """Render each message's content as a list of one part."""

    def part(message: dict[str, Any]) -> dict[str, Any]:
        return message | {"content": [{"type": "text", "text": message["content"]}]}

    return lambda messages, **others: render([part(message) for message in messages], **others)


_TOOL = Tool(
    name="umbel_probe_tool",
    description="umbel_probe_words",
    parameters={"type": "object", "properties": {"umbel_key": {"type": "string"}}},
)
_TOLD = openai_tools([_TOOL])
_CALL = ToolCall(id="umbel0001", name=_TOOL.name, arguments='{"umbel_key":"umbel value"}')
_LONG_ID = "call_umbel_0001"


class Probe:
    """Renders words that no template has, and looks for them in the result."""

    def __init__(self, render: Render, form: OutputFormat) -> None:
        self._render = render
        self._form = form

    def abilities(self) -> Abilities:
        """Find all abilities, by some twenty renderings."""
        call = self._call(as_text=True)
        as_text = bool(call)
        call = call or self._call(as_text=False)
        asks, system = _asks(as_text=as_text), self._shows("system", "user")
        key = self._reasoning_key(asks)
        described = self._text([_says("user", "umbel_a")], tools=_TOLD) or ""
        return Abilities(
            tools=bool(call) and _TOOL.name in described and "umbel_key" in described,
            call_text=call,
            any_id=bool(self._call(_LONG_ID, as_text=as_text)),
            arguments_as_text=as_text,
            several_calls=self._writes_several(asks),
            content_beside_thoughts=self._takes_both(asks, key),
            reasoning_key=key,
            system=system,
            late_system=system
            and self._shows("system", "system", "user", "assistant", "system", "user")
            and self._shows("user", "assistant", "system"),
            user_twice=self._shows("user", "user"),
            assistant_twice=self._shows("user", "assistant", "assistant", "user"),
            assistant_first=self._shows("assistant", "user"),
            thinking_switch=self._thinking(enable=False) != self._thinking(enable=True),
        )

    def shows_content(self) -> bool:
        """True if a prompt depends on the user's words, or the template refuses them."""
        one, other = (self._text([_says("user", words)]) for words in ("umbel_a", "umbel_b"))
        return one is None or one != other

    def _text(self, messages: Sequence[dict[str, Any]], **kwargs: Any) -> str | None:
        try:
            return self._render(messages, **kwargs)
        except TemplateError:
            return None

    def _shows(self, *roles: str) -> bool:
        contents = [f"umbel_{number}" for number in range(len(roles))]
        text = self._text(list(map(_says, roles, contents))) or ""
        places = [text.find(content) for content in contents]
        return places == sorted(places) and places[0] >= 0

    def _call(self, call_id: str = _CALL.id, *, as_text: bool) -> str:
        """Return the text of a rendered call if mlx-lm reads the same call from it."""
        form = self._form.tools
        if form is None:
            return ""
        turn = _turn(_asks(call_id, as_text=as_text), call_id)
        body = _last_body(self._text(turn, tools=_TOLD) or "", form)
        if as_text and _CALL.arguments not in body:
            return ""
        try:
            read = read_calls(body, form, _TOLD)[0]
        except MalformedCallError:
            return ""
        same = json.loads(read.arguments) == json.loads(_CALL.arguments)
        return form.start + body + form.end if same and read.name == _CALL.name else ""

    def _writes_several(self, asks: dict[str, Any]) -> bool:
        """True if a message's second call is written, or if even one call is refused."""
        (one,) = asks["tool_calls"]
        other = one | {"function": one["function"] | {"name": "umbel_other_tool"}}
        text = self._text(_turn(asks | {"tool_calls": [one, other]}), tools=_TOLD)
        return text is None or _CALL.name not in text or "umbel_other_tool" in text

    def _takes_both(self, asks: dict[str, Any], key: str) -> bool:
        """True unless a call with content and thoughts is refused, and one with thoughts is not."""
        thinks = asks | {key: "umbel_d"}
        both = self._text(_turn(thinks | {"content": "umbel_c"}), tools=_TOLD)
        return both is not None or self._text(_turn(thinks), tools=_TOLD) is None

    def _reasoning_key(self, asks: dict[str, Any]) -> str:
        """Find the key by a text answer, or by a call if thoughts of text answers are dropped."""
        for talk in (_turn(_says("assistant", "umbel_b"))[:2], _turn(asks)):
            for key in _REASONING_KEYS:
                thinks = talk[1] | {key: "umbel_thought"}
                if "umbel_thought" in (self._text([talk[0], thinks, *talk[2:]]) or ""):
                    return key
        return _REASONING_KEYS[0]

    def _thinking(self, *, enable: bool) -> str | None:
        return self._text([_says("user", "umbel_a")], options={"enable_thinking": enable})


def _says(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _asks(call_id: str = _CALL.id, *, as_text: bool) -> dict[str, Any]:
    return _says("assistant", "") | {"tool_calls": [native_call(_CALL, call_id, as_text=as_text)]}


def _turn(asks: dict[str, Any], call_id: str = _CALL.id) -> list[dict[str, Any]]:
    answer = _says("tool", "umbel_b") | {"tool_call_id": call_id, "name": _CALL.name}
    return [_says("user", "umbel_a"), asks, answer]


def _last_body(text: str, form: ToolFormat) -> str:
    rest = text.rpartition(form.start)[2]
    if form.end:
        return rest.partition(form.end)[0]
    match = _JSON_BEGINS.search(rest)
    return rest[: JsonSpan().feed(rest, match.start())] if match else ""
