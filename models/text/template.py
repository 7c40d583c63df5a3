"""Conversations to prompts, by a model's chat template, whatever that template supports.

`abilities` finds once, by rendering, which messages the template takes. Unsupported messages are
written in another way rather than refused:

- Tools of a template without tools, or whose calls mlx-lm cannot read, take the generic form.
- If only the first message may be a system message, those at the beginning are joined, and later
  ones become user messages. If none may be one, all become user messages.
- If only a message's first call is written, each call gets a message of its own, followed by its
  result.
- If content beside thoughts and a call is refused, the content joins the thoughts.
- If roles must alternate, messages of one role that follow each other are joined, and an answer at
  the beginning gets an empty user message before it.
- If the template shows only parts, text becomes a list of one part.

Joined texts have an empty line between them. Names of control tokens in a request's text are broken
first: see `control`. `tool_choice` does not change a prompt: requests that differ in it share it.
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

# Parameters of transformers' apply_chat_template that are no variables of a template.
_RESERVED = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "processor_kwargs"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "tokenizer_kwargs"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "load_audio_from_video"),
    }
)
_NO_NAMES = ControlText(())
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")  # Mistral's templates refuse other ids


class ChatTemplate:
    """A model's template and markers. Safe to call from several threads at once."""

    def __init__(
        self, render: Render, form: OutputFormat, control: ControlText = _NO_NAMES
    ) -> None:
        self.form = form
        self._render = render
        self._control = control

    @cached_property
    def abilities(self) -> Abilities:
        """The template's abilities, found at the first use."""
        return Probe(self._write, self.form).abilities()

    @cached_property
    def _write(self) -> Render:
        if Probe(self._render, self.form).shows_content():
            return self._render
        parted = in_parts(self._render)
        return parted if Probe(parted, self.form).shows_content() else _refuse

    def render(self, conversation: Conversation, *, generation_prompt: bool = True) -> str:
        """Render a conversation, and the beginning of an answer after it.

        Raises:
            TemplateError: the model has no template, an option is none of a template's, or the
                template refuses the messages.
        """
        if reserved := sorted(_RESERVED.intersection(conversation.options)):
            raise TemplateError(f"{reserved[0]!r} is not an option of a chat template")
        native = bool(conversation.tools) and self.abilities.tools
        conversation = self._control.conversation(self._with_thoughts_read(conversation))
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
        """True if an answer to a rendered prompt begins inside the thoughts."""
        reasoning = self.form.reasoning
        return reasoning is not None and prompt.rstrip().endswith(reasoning.start)

    def _with_thoughts_read(self, conversation: Conversation) -> Conversation:
        """Read thoughts that a client sends back inside an answer's content.

        Templates drop them by their markers, which `control` breaks in content.
        """
        marks = self.form.reasoning
        if marks is None or not any(marks.end in m.content for m in conversation.messages):
            return conversation
        start, end = map(re.escape, (marks.start, marks.end))
        messages = list(conversation.messages)
        for i, message in enumerate(messages):
            found = re.fullmatch(rf"\s*{start}(.*?){end}\s*(.*)", message.content, re.DOTALL)
            if found and message.role == "assistant" and not message.reasoning:
                messages[i] = msgspec.structs.replace(
                    message, content=found[2], reasoning=found[1].strip("\n")
                )
        return msgspec.structs.replace(conversation, messages=messages)

    def _dicts(self, conversation: Conversation, *, native: bool) -> _Dicts:
        messages = conversation.messages
        if native or (self.abilities.tools and not conversation.tools):
            names = {call.id: call.name for m in messages for call in m.tool_calls}
            split = messages if self.abilities.several_calls else _one_call_each(messages)
            dicts = [self._native_message(m, names) for m in split]
        else:
            dicts = self._generic(messages, conversation.tools)
        can = self.abilities
        if not can.late_system:
            dicts = _only_first_system(dicts)
        if not can.system:
            dicts = [_as_user(m) for m in dicts]
        dicts = _merged(dicts, users=not can.user_twice, answers=not can.assistant_twice)
        return dicts if can.assistant_first else _with_user_first(dicts)

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
                for message in group:
                    content = with_calls(message.content, message.tool_calls)
                    key, thoughts = self.abilities.reasoning_key, message.reasoning
                    more = {key: thoughts} if thoughts else {}
                    dicts.append({"role": message.role, "content": content, **more})
        if not tools:
            return dicts
        leading, others = _parted(dicts)
        *before, last = leading or [{"role": "system", "content": ""}]
        told = last | {"content": _joined([last["content"], definitions(tools)])}
        return [*before, told, *others]


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
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


def _only_first_system(dicts: _Dicts) -> _Dicts:
    leading, others = _parted(dicts)
    first = {"role": "system", "content": _joined(m["content"] for m in leading)}
    return [*([first] if leading else []), *map(_as_user, others)]


def _parted(dicts: _Dicts) -> tuple[_Dicts, _Dicts]:
    count = next((i for i, m in enumerate(dicts) if m["role"] != "system"), len(dicts))
    return dicts[:count], dicts[count:]


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"role": "user"} if message["role"] == "system" else message


def _merged(dicts: _Dicts, *, users: bool, answers: bool) -> _Dicts:
    """Join messages without calls that follow each other in one role."""

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
    leading, others = _parted(dicts)
    if not others or others[0]["role"] != "assistant":
        return dicts
    return [*leading, {"role": "user", "content": ""}, *others]


def _refuse(*_: object, **__: object) -> str:
    raise TemplateError("the model's chat template does not show messages; use /v1/completions")


def _joined(texts: Iterable[str]) -> str:
    return "\n\n".join(text for text in texts if text)
