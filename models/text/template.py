"""Conversations to prompts with a model's chat template, whatever that template knows.

What a template can do is found once, by rendering: whether it takes tools, a call's arguments
as an object or as JSON text, earlier thoughts, a system message that is not the first. What it
cannot do is written in another way rather than refused:

- Tools in a template that knows none, or whose calls mlx-lm cannot read: the generic form, which
  `tools` describes.
- System messages where only the first may be one: those at the beginning become one, with an
  empty line between; a later one becomes a message of the user's.
- Several calls in a message where only the first is written: each gets a message of its own, with
  its result behind it.
- Content beside thoughts and a call where a template refuses that: both are thoughts.
- No system messages at all: they become a message of the user's.
- Two messages of one role one after the other where the template asks for alternation: they
  become one, with an empty line between. An answer at the beginning gets an empty message of the
  user's before it.
- Content as text where the template shows only parts: it becomes a list of one.

Names of control tokens in what a request says are broken first: see `control`.

`tool_choice` does not change a prompt: requests that differ in it share all of it.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby, takewhile
from typing import Any

import msgspec

from ..errors import TemplateError
from .abilities import Abilities, Probe, Render, in_parts
from .control import ControlText
from .conversation import Conversation, Message, Tool
from .formats import OutputFormat
from .tools import definitions, native_call, openai_tools, tool_results, with_calls

_Dicts = list[dict[str, Any]]

# What transformers' apply_chat_template takes besides what a template does.
_RESERVED = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "processor_kwargs"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "load_audio_from_video"),
    }
)
_NO_NAMES = ControlText(())
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")  # Mistral's templates refuse any other


class ChatTemplate:
    """One model's way of writing conversations. Safe to call from several threads at once."""

    def __init__(
        self, render: Render, form: OutputFormat, control: ControlText = _NO_NAMES
    ) -> None:
        self.form = form
        self._render = render
        self._control = control

    @cached_property
    def abilities(self) -> Abilities:
        """The template's abilities, found by rendering at the first use."""
        return Probe(self._write, self.form).abilities()

    @cached_property
    def _write(self) -> Render:
        """Render with content as text, or in parts where the template shows it only so."""
        if Probe(self._render, self.form).shows_content():
            return self._render
        parted = in_parts(self._render)
        return parted if Probe(parted, self.form).shows_content() else _refuse

    def render(self, conversation: Conversation, *, generation_prompt: bool = True) -> str:
        """Render a conversation, and the beginning of an answer behind it.

        Raises:
            TemplateError: the model has no template, an option is not one of a template's, or
                the template refuses the messages.
        """
        if reserved := sorted(_RESERVED.intersection(conversation.options)):
            raise TemplateError(f"{reserved[0]!r} is not an option of a chat template")
        native = bool(conversation.tools) and self.abilities.tools
        conversation = self._control.conversation(self._with_thoughts_apart(conversation))
        try:
            dicts = self._dicts(conversation, native=native)
        except TemplateError as error:
            raise TemplateError(self._control.plain(str(error))) from error
        return self._write(
            dicts,
            tools=openai_tools(conversation.tools) if native else None,
            generation_prompt=generation_prompt,
            options=conversation.options,
        )

    def opens_reasoning(self, prompt: str) -> bool:
        """True if an answer to a rendered prompt begins inside the model's thoughts."""
        reasoning = self.form.reasoning
        return reasoning is not None and prompt.rstrip().endswith(reasoning.start)

    def _with_thoughts_apart(self, conversation: Conversation) -> Conversation:
        """Read the thoughts that a client sends back inside an answer's content.

        Templates cut them off at their marks, which are broken in content.
        """
        marks = self.form.reasoning
        if marks is None or not any(marks.end in m.content for m in conversation.messages):
            return conversation
        begins = re.compile(
            rf"\s*{re.escape(marks.start)}(.*?){re.escape(marks.end)}\s*(.*)", re.DOTALL
        )

        def apart(message: Message) -> Message:
            found = message.role == "assistant" and begins.fullmatch(message.content)
            if not found or message.reasoning:
                return message
            thoughts, content = found[1].strip("\n"), found[2]
            return msgspec.structs.replace(message, content=content, reasoning=thoughts)

        messages = [apart(message) for message in conversation.messages]
        return msgspec.structs.replace(conversation, messages=messages)

    # -- messages --------------------------------------------------------------------------

    def _dicts(self, conversation: Conversation, *, native: bool) -> _Dicts:
        messages = conversation.messages
        if native or (self.abilities.tools and not conversation.tools):
            dicts = self._native(messages)
        else:
            dicts = self._generic(messages, conversation.tools)
        can = self.abilities
        if not can.late_system:
            dicts = _only_first_system(dicts)
        if not can.system:
            dicts = [_as_user(m) for m in dicts]
        dicts = _merged(dicts, users=not can.user_twice, answers=not can.assistant_twice)
        return dicts if can.assistant_first else _with_user_first(dicts)

    def _native(self, messages: Sequence[Message]) -> _Dicts:
        names = {call.id: call.name for m in messages for call in m.tool_calls}
        if not self.abilities.several_calls:
            messages = _one_call_each(messages)
        return [self._native_message(m, names) for m in messages]

    def _native_message(self, message: Message, names: Mapping[str, str]) -> dict[str, Any]:
        content, thoughts = message.content, message.reasoning
        if message.tool_calls and not self.abilities.content_beside_thoughts:
            content, thoughts = ("", _joined([thoughts, content])) if thoughts else (content, "")
        written: dict[str, Any] = {"role": message.role, "content": content}
        if thoughts:
            written[self.abilities.reasoning_key] = thoughts
        if message.tool_calls:
            as_text = self.abilities.arguments_as_text
            written["tool_calls"] = [
                self._control.value(native_call(call, self._id(call.id), as_text=as_text))
                for call in message.tool_calls
            ]
        if message.role == "tool":
            called = message.tool_call_id or ""
            written["tool_call_id"] = self._id(called)
            written["name"] = message.name or names.get(called, "")
        return written

    def _id(self, call_id: str) -> str:
        if self.abilities.any_id or _SHORT_ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    def _generic(self, messages: Sequence[Message], tools: Sequence[Tool]) -> _Dicts:
        dicts: _Dicts = []
        for is_result, group in groupby(messages, lambda m: m.role == "tool"):
            if is_result:
                dicts.append({"role": "user", "content": tool_results(group)})
            else:
                dicts += [self._generic_message(message) for message in group]
        return _with_definitions(dicts, tools) if tools else dicts

    def _generic_message(self, message: Message) -> dict[str, Any]:
        content = with_calls(message.content, message.tool_calls)
        written: dict[str, Any] = {"role": message.role, "content": content}
        if message.reasoning:
            written[self.abilities.reasoning_key] = message.reasoning
        return written


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Give each call a message of its own, with its result behind it."""
    split: list[Message] = []
    left = list(messages)
    while left:
        message = left.pop(0)
        results = list(takewhile(lambda m: m.role == "tool", left if message.tool_calls else []))
        del left[: len(results)]
        for number, call in enumerate(message.tool_calls):
            words = Message(role="assistant") if number else message
            split.append(msgspec.structs.replace(words, tool_calls=[call]))
            split += [result for result in results if result.tool_call_id == call.id]
        ids = {call.id for call in message.tool_calls}
        split += [result for result in results if result.tool_call_id not in ids]
        if not message.tool_calls:
            split.append(message)
    return split


def _with_definitions(dicts: _Dicts, tools: Sequence[Tool]) -> _Dicts:
    leading, others = _parted(dicts)
    *before, last = leading or [{"role": "system", "content": ""}]
    told = last | {"content": _joined([last["content"], definitions(tools)])}
    return [*before, told, *others]


def _only_first_system(dicts: _Dicts) -> _Dicts:
    leading, others = _parted(dicts)
    first = {"role": "system", "content": _joined(m["content"] for m in leading)}
    return [*([first] if leading else []), *map(_as_user, others)]


def _parted(dicts: _Dicts) -> tuple[_Dicts, _Dicts]:
    """Part the system messages at the beginning from the others."""
    count = next((i for i, m in enumerate(dicts) if m["role"] != "system"), len(dicts))
    return dicts[:count], dicts[count:]


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": "user"} if message["role"] == "system" else message


def _merged(dicts: _Dicts, *, users: bool, answers: bool) -> _Dicts:
    """Join messages of one role that follow each other; not those with calls."""

    def kind(message: dict[str, Any]) -> str:
        joins = (users and message["role"] == "user") or (
            answers and message["role"] == "assistant" and "tool_calls" not in message
        )
        return str(message["role"]) if joins else ""

    merged: _Dicts = []
    for joins, group in groupby(dicts, kind):
        first, *others = group
        if joins and others:
            keys = {key: None for message in (first, *others) for key in message if key != "role"}
            joined = {key: _joined(m.get(key, "") for m in (first, *others)) for key in keys}
            first, others = first | joined, []
        merged += [first, *others]
    return merged


def _with_user_first(dicts: _Dicts) -> _Dicts:
    """Put an empty message of the user's before an answer that nothing has asked for."""
    leading, others = _parted(dicts)
    if not others or others[0]["role"] != "assistant":
        return dicts
    return [*leading, {"role": "user", "content": ""}, *others]


def _refuse(*_: object, **__: object) -> str:
    raise TemplateError("the model's chat template does not show messages; use /v1/completions")


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(text for text in texts if text)
