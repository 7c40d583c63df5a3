"""OpenAI's responses: the body of `POST /v1/responses`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Raw

from ...models.text.conversation import Constraint, Conversation, Message
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check
from .chat import ConversationId, ConversationName
from .generation_request import GenerationRequest, unsupported
from .openai_fields import (
    Bound,
    FormatKind,
    OpenAIFields,
    SchemaFormat,
    Tokens,
    Verbosity,
    bound_of,
    format_constraints,
)
from .response_items import split_input
from .response_messages import FindItem, read_items
from .response_tools import ResponseTools, read_response_choice, read_response_tools
from .template_options import read_options
from .tools import ToolList

MAX_TOP_LOGPROBS = 20
MAX_INCLUDED = 32
MAX_SESSION = 256
_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
# What can be included of tools and images that are never in an answer of this daemon.
_NOTHING_TO_INCLUDE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
Summary = Literal["auto", "concise", "detailed"]

# What would change the answer and is not done here, and what to do instead.
_REFUSED = {
    "background": "leave it out, and stream the answer",
    "prompt": "send its text as input",
    "context_management": "leave it out, and send a shorter input",
    "moderation": "leave it out",
    "reasoning_effort": "send reasoning.effort",
    "response_format": "send text.format",
    "max_completion_tokens": "send max_output_tokens",
}

# Members of `reasoning` that other servers know and would change the answer: the value that changes
# nothing, and what to do instead.
_REFUSED_OF_REASONING: dict[str, tuple[object, str]] = {
    "max_tokens": (None, "send reasoning.effort, or max_output_tokens for all of the answer"),
    "enabled": (True, "send a reasoning.effort of none to switch thinking off"),
    "exclude": (False, "leave it out, and skip the items of type reasoning"),
}

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class ReasoningOptions(msgspec.Struct):
    """How much the model shall think, and what is said of it."""

    effort: Annotated[str, Meta(max_length=64)] | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    max_tokens: Any = None
    enabled: Any = None
    exclude: Any = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    """What the text must be."""

    type: FormatKind
    name: Annotated[str, Meta(max_length=64)] | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    json_schema: SchemaFormat | None = None

    def constraints(self) -> list[Constraint]:
        """List what the text must match; nothing for text.

        Raises:
            APIError: 400, there is no schema.
        """
        return format_constraints(
            self.type,
            schema=self.schema,
            named=self.json_schema,
            field="text.format",
            place="schema",
        )


class TextOptions(msgspec.Struct):
    """What the text must be, and how long."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReadResponse(NamedTuple):
    """What a body says.

    Attributes:
        request: what is to be generated.
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
    background: bool | None = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    max_completion_tokens: Any = None

    @property
    def told_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside the chosen one; None: nothing is."""
        return (self.top_logprobs or 0) if _LOGPROBS in (self.include or []) else None

    @property
    def summary(self) -> Summary | None:
        """What is asked for of a summary of the model's thoughts: it has all of them."""
        asked = self.reasoning or ReasoningOptions()
        return asked.summary or asked.generate_summary

    @property
    def encrypts_reasoning(self) -> bool:
        """Whether thoughts come in a form that a client need not read to send them back."""
        return _ENCRYPTED in (self.include or [])

    @property
    def conversation_name(self) -> str | None:
        """What the body calls its conversation, if it does."""
        named = self.conversation
        return named.id if isinstance(named, ConversationId) else named

    @property
    def previous_response(self) -> str | None:
        """The id of the response that the body goes on with, if it does."""
        return self.previous_response_id

    @property
    def session_name(self) -> str | None:
        """What the body calls its agent's session: a thread, or a cache key."""
        metadata = self.client_metadata or {}
        for key in ("thread_id", "session_id"):
            named = metadata.get(key)
            if isinstance(named, str) and 0 < len(named) <= MAX_SESSION and named.isprintable():
                return named
        return super().session_name

    @property
    def _effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    def refuse_unsupported(self) -> None:
        """Refuse what would change the answer and cannot be done."""
        super().refuse_unsupported()
        for field, advice in _REFUSED.items():
            if getattr(self, field):
                raise unsupported(field, advice)
        for field, (neutral, advice) in _REFUSED_OF_REASONING.items():
            if getattr(self.reasoning, field, None) not in (None, neutral):
                raise unsupported(f"reasoning.{field}", advice)
        if self.n is not None and self.n > 1:
            raise unsupported("n", "send one request for each answer")
        self._refuse_included()

    def generation_request(self, check: Check) -> GenerationRequest:
        """Read a body that refers to nothing stored; see `GenerationBody`."""
        return self.read([], lambda _: None, check).request

    def read(self, past: Sequence[bytes], find: FindItem, check: Check) -> ReadResponse:
        """Read the whole body, on a worker's thread.

        Args:
            past: the JSON of the items that it goes on with.
            find: looks up items that its input refers to.
            check: called between two stages; raises what ends the work.

        Raises:
            APIError: 400 or 404, naming what is wrong.
        """
        items = read_items(past, split_input(self.input), find, check)
        if self.instructions:
            items.messages.insert(0, Message(role="system", content=self.instructions))
        if not items.messages:
            raise APIError(400, "input has no items; send at least one", param="input")
        tools = read_response_tools(self.tools or [], check)
        told, choice = read_response_choice(
            self.tool_choice, tools, parallel=self.parallel_tool_calls
        )
        conversation = Conversation(
            messages=items.messages,
            tools=told,
            tool_choice=choice,
            options=read_options(self.chat_template_kwargs, self._effort),
        )
        request = GenerationRequest(
            prompts=[conversation],
            sampling=self.sampling(),
            max_tokens=bound_of(
                max_output_tokens=self.max_output_tokens, max_tokens=self.max_tokens
            ),
            stops=self.stops,
            constraint=self._constraint(),
        )
        return ReadResponse(request, items.kept, tools)

    def _constraint(self) -> Constraint | None:
        wanted = self.text.format.constraints() if self.text and self.text.format else []
        return self.constraint(*wanted)

    def release(self) -> None:
        """Let go of input and tools, which are views of the body."""
        self.input, self.tools = Raw(b""), None

    def _refuse_included(self) -> None:
        for name in self.include or []:
            if name not in (_LOGPROBS, _ENCRYPTED) and name not in _NOTHING_TO_INCLUDE:
                message = f"include has {quote(name)}, which is not known; leave it out"
                raise APIError(400, message, param="include")
        if self.top_logprobs and self.told_logprobs is None:
            message = f"top_logprobs needs include to have '{_LOGPROBS}'"
            raise APIError(400, message, param="top_logprobs")
