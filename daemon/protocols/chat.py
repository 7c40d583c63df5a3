"""OpenAI's chat completions: the body of `POST /v1/chat/completions`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from ...models.text.conversation import CacheHint, Conversation, Message, ToolCall
from ..http.bodies import decode_part
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check
from .content import MarkedText, marked, stand_in
from .generation_request import (
    EMPTY,
    GenerationRequest,
    Refused,
    template_options,
    unsupported,
)
from .openai_fields import (
    Bound,
    ConversationId,
    ConversationName,
    OpenAIFields,
    ResponseFormat,
    Verbosity,
    bound_of,
    format_constraints,
    name_of,
)
from .tools import ToolList, arguments_text, check_results, read_chat_tools, read_choice

MAX_MESSAGES = 10_000
MAX_PARTS = 1000
MAX_CALLS = 1000
MAX_CHAT_LOGPROBS = 20

Parts = Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)]

_OLD_CALLS = Refused("send tools and tool_choice", EMPTY)


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
    content: str | Parts | None = None
    tool_calls: Annotated[list[ChatToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None

    def message(self, place: str) -> tuple[Message, list[int]]:
        """Return the message that a template renders, and the offsets of its cache marks."""
        if self.function_call is not None:
            raise unsupported(f"{place}.function_call", "send tool_calls")
        content, ends = _content(place, self.content, is_result=self.role == "tool")
        message = Message(
            # Templates know "system"; "developer" is OpenAI's newer name for it.
            role="system" if self.role == "developer" else self.role,
            content=content,
            reasoning=self.reasoning_content or self.reasoning or "",
            tool_calls=[
                ToolCall(
                    id=call.id,
                    name=call.function.name,
                    arguments=arguments_text(call.function.arguments),
                )
                for call in self.tool_calls or []
            ],
            tool_call_id=self.tool_call_id,
        )
        return message, ends


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
    verbosity: Verbosity | None = None

    functions: Annotated[Any, _OLD_CALLS] = None
    function_call: Annotated[Any, _OLD_CALLS] = None
    modalities: Annotated[list[str] | None, Refused("ask for text only", ([], ["text"]))] = None
    audio: Annotated[Any, Refused("ask for text only", EMPTY)] = None
    web_search_options: Annotated[Any, Refused("send a function that searches as a tool")] = None
    echo: Annotated[bool | None, Refused("leave it out: the prompt is not sent back", (False,))] = (
        None
    )
    reasoning: Annotated[Any, Refused("send reasoning_effort")] = None

    @property
    def told_logprobs(self) -> int | None:
        """Number of likeliest tokens told beside the chosen one; None tells neither."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def conversation_name(self) -> str | None:
        """Name of the conversation, if the body has one."""
        return name_of(self.conversation)

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the answer and are not served."""
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")

    def release(self) -> None:
        """Drop messages and tools, which are views of the body."""
        self.messages, self.tools = [], None

    def generation_request(self, check: Check) -> GenerationRequest:
        """Read the whole body; see `GenerationBody`."""
        bounds = {
            "max_completion_tokens": self.max_completion_tokens,
            "max_tokens": self.max_tokens,
        }
        formats = format_constraints(self.response_format, "response_format", "json_schema.schema")
        return GenerationRequest(
            prompts=[self.read_conversation(check)],
            sampling=self.sampling(),
            n=self.n or 1,
            max_tokens=bound_of(**bounds),
            stops=self.stops,
            constraint=self.constraint(*formats),
        )

    def read_conversation(self, check: Check) -> Conversation:
        """Read messages and tools, one by one."""
        messages, hints = [], []
        for index, raw in enumerate(self.messages):
            check()
            place = f"messages[{index}]"
            message, ends = decode_part(raw, ChatMessage, place).message(place)
            messages.append(message)
            hints += [CacheHint(index, end) for end in ends if end]
        check_results(messages)
        tools = read_chat_tools(self.tools or [], check)
        return Conversation(
            messages=messages,
            tools=tools,
            tool_choice=read_choice(self.tool_choice, tools, parallel=self.parallel_tool_calls),
            options=template_options(self.chat_template_kwargs, self.reasoning_effort),
            hints=hints,
        )


def text_of(part: dict[str, Any]) -> str | None:
    """Return the text of a content's part in OpenAI's protocols; None if it is no text."""
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        return None
    text = part.get("refusal" if kind == "refusal" else "text")
    return text if isinstance(text, str) else None


def no_text(part: dict[str, Any], place: str, field: str) -> APIError:
    """Make the error for a part that is no text, in a field of a message or item."""
    kind = quote(part.get("type"))
    message = f"{place} has a part of type {kind}, which this model cannot read; send text"
    return APIError(400, message, param=f"{place}.{field}")


def _content(place: str, content: str | Parts | None, *, is_result: bool) -> MarkedText:
    """Join a content's parts; in a tool's result, words stand for those that are no text."""
    if content is None or isinstance(content, str):
        return MarkedText(content or "", [])
    texts = []
    for part in content:
        text = text_of(part)
        if text is not None:
            texts.append((text, _is_marked(place, part.get("cache_control"))))
        elif is_result:
            texts.append((stand_in(part.get("type")), False))
        else:
            raise no_text(part, place, "content")
    return marked(texts, between="")


def _is_marked(place: str, mark: object) -> bool:
    match mark:
        case None:
            return False
        case {"type": "ephemeral"}:
            return True
    message = f"{place} has a part whose cache_control is not of type 'ephemeral'; send that type"
    raise APIError(400, message, param=f"{place}.content")
