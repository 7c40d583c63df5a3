"""OpenAI's responses: the body of `POST /v1/responses`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Raw

from ...models.text.conversation import Conversation, Message
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check
from .generation_request import (
    EMPTY,
    GenerationRequest,
    Refused,
    Tokens,
    refuse,
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
from .response_items import FindItem, read_items, split_input
from .response_tools import ResponseTools, read_response_choice, read_response_tools
from .tools import ToolList

MAX_TOP_LOGPROBS = 20
MAX_INCLUDED = 32
MAX_SESSION = 256
_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_INCLUDED = frozenset(
    {
        *(_LOGPROBS, _ENCRYPTED),
        # Of tools and images, which no answer of umbel has.
        *("code_interpreter_call.outputs", "computer_call_output.output.image_url"),
        *("file_search_call.results", "message.input_image.image_url"),
        *("web_search_call.action.sources", "web_search_call.results"),
    }
)
_LEAVE_OUT = Refused("leave it out", EMPTY)

Summary = Literal["auto", "concise", "detailed"]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class ReasoningOptions(msgspec.Struct):
    """Effort and summary of reasoning, and members of other servers that are refused."""

    effort: Annotated[str, Meta(max_length=64)] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    max_tokens: Annotated[
        Any, Refused("send reasoning.effort, or max_output_tokens for all of the answer")
    ] = None
    enabled: Annotated[
        Any, Refused("send a reasoning.effort of none to switch thinking off", (True,))
    ] = None
    exclude: Annotated[
        Any, Refused("leave it out, and skip the items of type reasoning", (False,))
    ] = None


class TextFormat(ResponseFormat, omit_defaults=True):
    """The format of the answer's text."""

    name: Annotated[str, Meta(max_length=64)] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct):
    """Format and length of the text."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReadResponse(NamedTuple):
    """A body that was read.

    Attributes:
        request: made of it.
        items: the JSON of the input's items, as a store keeps them.
        tools: that may be called.
    """

    request: GenerationRequest
    items: list[bytes]
    tools: ResponseTools


class ResponsesRequest(OpenAIFields, kw_only=True):
    """The body. Each item of its input and each tool is decoded on its own."""

    input: Raw
    instructions: str | None = None
    max_output_tokens: Bound | None = None
    tools: ToolList | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: Annotated[list[str], Meta(max_length=MAX_INCLUDED)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    store: bool | None = None
    previous_response_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    conversation: ConversationName | ConversationId | None = None
    metadata: Metadata | None = None
    client_metadata: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: Tokens | None = None

    background: Annotated[bool | None, Refused("leave it out, and stream the answer", (False,))] = (
        None
    )
    prompt: Annotated[Any, Refused("send its text as input", EMPTY)] = None
    context_management: Annotated[Any, Refused("leave it out, and send a shorter input", EMPTY)] = (
        None
    )
    moderation: Annotated[Any, _LEAVE_OUT] = None
    reasoning_effort: Annotated[Any, Refused("send reasoning.effort", EMPTY)] = None
    response_format: Annotated[Any, Refused("send text.format", EMPTY)] = None
    max_completion_tokens: Annotated[Any, Refused("send max_output_tokens", EMPTY)] = None

    @property
    def told_logprobs(self) -> int | None:
        """Number of likeliest tokens told beside the chosen one; None tells neither."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or []) else None

    @property
    def summary(self) -> Summary | None:
        """The summary of reasoning that is asked for; any has all of the reasoning."""
        asked = self.reasoning or ReasoningOptions()
        return asked.summary or asked.generate_summary

    @property
    def encrypts_reasoning(self) -> bool:
        """True if reasoning comes in a form that a client sends back without reading it."""
        return _ENCRYPTED in (self.include or [])

    @property
    def conversation_name(self) -> str | None:
        """Name of the conversation, if the body has one."""
        return name_of(self.conversation)

    @property
    def session_name(self) -> str | None:
        """Name of the agent's session: a thread, or a cache key."""
        metadata = self.client_metadata or {}
        for key in ("thread_id", "session_id"):
            named = metadata.get(key)
            if isinstance(named, str) and 0 < len(named) <= MAX_SESSION and named.isprintable():
                return named
        return super().session_name

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the answer and are not served."""
        super().refuse_unsupported()
        if self.reasoning is not None:
            refuse(self.reasoning, "reasoning.")
        if self.n is not None and self.n > 1:
            raise unsupported("n", "send one request for each answer")
        for name in self.include or []:
            if name not in _INCLUDED:
                message = f"include has {quote(name)}, which is not known; leave it out"
                raise APIError(400, message, param="include")
        if self.top_logprobs and self.told_logprobs is None:
            message = f"top_logprobs needs include to have '{_LOGPROBS}'"
            raise APIError(400, message, param="top_logprobs")

    def release(self) -> None:
        """Drop input and tools, which are views of the body."""
        self.input, self.tools = Raw(b""), None

    def generation_request(self, check: Check) -> GenerationRequest:
        """Read a body that refers to nothing stored; see `GenerationBody`."""
        return self.read([], lambda _: None, check).request

    def read(self, past: Sequence[bytes], find: FindItem, check: Check) -> ReadResponse:
        """Read the whole body, on a worker's thread.

        Args:
            past: the JSON of the items that the input continues.
            find: looks up items that the input refers to.
            check: called between two stages; raises what ends the work.

        Raises:
            APIError: 400; 404 for an item that is not stored.
        """
        items = read_items(past, split_input(self.input), find, check)
        if self.instructions:
            items.messages.insert(0, Message(role="system", content=self.instructions))
        if not items.messages:
            raise APIError(400, "input has no items; send at least one", param="input")
        tools = read_response_tools(self.tools or [], check)
        offered, choice = read_response_choice(
            self.tool_choice, tools, parallel=self.parallel_tool_calls
        )
        effort = self.reasoning.effort if self.reasoning else None
        conversation = Conversation(
            messages=items.messages,
            tools=offered,
            tool_choice=choice,
            options=template_options(self.chat_template_kwargs, effort),
        )
        text = self.text or TextOptions()
        bounds = {"max_output_tokens": self.max_output_tokens, "max_tokens": self.max_tokens}
        formats = format_constraints(text.format, "text.format", "schema")
        request = GenerationRequest(
            prompts=[conversation],
            sampling=self.sampling(),
            max_tokens=bound_of(**bounds),
            stops=self.stops,
            constraint=self.constraint(*formats),
        )
        return ReadResponse(request, items.kept, tools)
