"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from ...models.text.conversation import CacheHint, Constraint, Conversation, Message, ToolCall
from ..http.decoding import decode_part
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check
from .cache_control import MarkedText, marked
from .generation_request import GenerationRequest, unsupported
from .openai_fields import (
    Bound,
    FormatKind,
    OpenAIFields,
    SchemaFormat,
    Verbosity,
    bound_of,
    format_constraints,
)
from .template_options import read_options
from .tools import ToolList, arguments_text, check_results, read_chat_tools, read_choice
from .unreadable import stand_in

MAX_MESSAGES = 10_000
MAX_PARTS = 1000
MAX_CALLS = 1000
MAX_CHAT_LOGPROBS = 20
_TEXT_PARTS = ("text", "input_text", "output_text")

ConversationName = Annotated[str, Meta(max_length=256)]


class CalledFunction(msgspec.Struct):
    """A call's function and arguments."""

    name: str
    arguments: Any = None


class ChatToolCall(msgspec.Struct):
    """A call in an assistant's message."""

    id: str
    function: CalledFunction
    type: Literal["function", ""] | None = None


class ChatMessage(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)] | None = None
    tool_calls: Annotated[list[ChatToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None

    def message(self, place: str) -> tuple[Message, list[int]]:
        """Turn it into what a template renders.

        Returns:
            Also where parts of its content end that are marked for the cache, in characters.

        Raises:
            APIError: 400 for a part that is not text, and for a call in the old way.
        """
        if self.function_call is not None:
            raise unsupported(f"{place}.function_call", "send tool_calls")
        # Templates know "system"; "developer" is OpenAI's newer name for the same voice.
        role = "system" if self.role == "developer" else self.role
        calls = [
            ToolCall(
                id=call.id,
                name=call.function.name,
                arguments=arguments_text(call.function.arguments),
            )
            for call in self.tool_calls or []
        ]
        content, ends = text_of(place, self.content, is_result=role == "tool")
        message = Message(
            role=role,
            content=content,
            reasoning=self.reasoning_content or self.reasoning or "",
            tool_calls=calls,
            tool_call_id=self.tool_call_id,
        )
        return message, ends


class ResponseFormat(msgspec.Struct):
    """What the content must be."""

    type: FormatKind
    json_schema: SchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None

    def constraints(self) -> list[Constraint]:
        """List what the content must match; nothing for text.

        Raises:
            APIError: 400, there is no schema.
        """
        return format_constraints(
            self.type,
            schema=self.schema,
            named=self.json_schema,
            field="response_format",
            place="json_schema.schema",
        )


class ConversationId(msgspec.Struct):
    """A conversation named by an object."""

    id: ConversationName


class ChatRequest(OpenAIFields, kw_only=True):
    """The body. Each message and each tool is decoded on its own."""

    messages: Annotated[list[Raw], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Bound | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None
    tools: ToolList | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    conversation: ConversationName | ConversationId | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    verbosity: Verbosity | None = None
    echo: bool | None = None
    reasoning: Any = None

    @property
    def told_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told; asking for none tells the chosen one."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """How many tokens an answer may have, if that is bounded."""
        return bound_of(
            max_completion_tokens=self.max_completion_tokens, max_tokens=self.max_tokens
        )

    @property
    def conversation_name(self) -> str | None:
        """What the body calls its conversation, if it does."""
        named = self.conversation
        return named.id if isinstance(named, ConversationId) else named

    def refuse_unsupported(self) -> None:
        """Refuse what would change the answer and cannot be done."""
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        for field in ("functions", "function_call"):
            if getattr(self, field):
                raise unsupported(field, "send tools and tool_choice")
        if self.audio or (self.modalities and self.modalities != ["text"]):
            raise unsupported("audio" if self.audio else "modalities", "ask for text only")
        if self.echo:
            raise unsupported("echo", "leave it out: the prompt is not sent back")
        if self.reasoning is not None:
            raise unsupported("reasoning", "send reasoning_effort")
        if self.web_search_options is not None:
            raise unsupported("web_search_options", "send a function that searches as a tool")

    def release(self) -> None:
        """Let go of messages and tools, which are views of the body."""
        self.messages, self.tools = [], None

    def generation_request(self, check: Check) -> GenerationRequest:
        """Read the whole body; see `GenerationBody`."""
        return GenerationRequest(
            prompts=[self.read_conversation(check)],
            sampling=self.sampling(),
            n=self.n or 1,
            max_tokens=self.most_tokens,
            stops=self.stops,
            constraint=self.constraint(
                *(self.response_format.constraints() if self.response_format else [])
            ),
        )

    def read_conversation(self, check: Check) -> Conversation:
        """Read messages and tools, one by one.

        Raises:
            APIError: 400, naming what is wrong.
        """
        messages, hints = [], []
        for index, raw in enumerate(self.messages):
            check()
            place = f"messages[{index}]"
            message, ends = decode_part(raw, ChatMessage, place).message(place)
            messages.append(message)
            hints += [CacheHint(index, end) for end in ends if end]
        check_results(messages)
        tools = read_chat_tools(self.tools or [], check)
        choice = read_choice(self.tool_choice, tools, parallel=self.parallel_tool_calls)
        options = read_options(self.chat_template_kwargs, self.reasoning_effort)
        return Conversation(
            messages=messages, tools=tools, tool_choice=choice, options=options, hints=hints
        )


def text_of(
    place: str, content: str | list[dict[str, Any]] | None, *, is_result: bool
) -> MarkedText:
    """Join a content's parts.

    Args:
        place: of the message.
        content: of it.
        is_result: a tool's: parts that are no text are named in it, and not refused.

    Raises:
        APIError: 400, naming the part.
    """
    if content is None or isinstance(content, str):
        return MarkedText(content or "", [])
    return marked([_part(place, part, is_result=is_result) for part in content], between="")


def _part(place: str, part: dict[str, Any], *, is_result: bool) -> tuple[str, bool]:
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind in (*_TEXT_PARTS, "refusal") and isinstance(text, str):
        return text, _is_marked(place, part.get("cache_control"))
    if is_result:
        return stand_in(kind), False
    message = f"{place} has a part of type {quote(kind)}, which this model cannot read; send text"
    raise APIError(400, message, param=f"{place}.content")


def _is_marked(place: str, mark: object) -> bool:
    match mark:
        case None:
            return False
        case {"type": "ephemeral"}:
            return True
    message = f"{place} has a part whose cache_control is not of type 'ephemeral'; send that type"
    raise APIError(400, message, param=f"{place}.content")
