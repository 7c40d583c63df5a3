"""Anthropic's messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from ...models.params import SamplingParams
from ...models.text.conversation import Constraint, Conversation, JSONSchema
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check
from .cache_control import CacheControl, Markable
from .chat import MAX_MESSAGES
from .errors import THREADS_UNSUPPORTED
from .generation_request import GenerationBody, GenerationRequest, unsupported
from .messages_blocks import MAX_BLOCKS
from .messages_reader import MessageReader
from .messages_tools import MessagesToolChoice, read_choice, read_tools
from .openai_fields import MAX_KEY, MAX_STOP_SEQUENCES, Probability, StopSequence, Tokens
from .template_options import read_options
from .tools import ToolList

MAX_USER_ID = 2048
MAX_EDITS = 16
_LEAST_BUDGET = 1024
_CLEAR_THINKING = "clear_thinking_20251015"


# OpenAI's fields that would change the answer, and what this protocol has instead.
_FOREIGN = {
    "seed": "use chat completions",
    "min_p": "use chat completions",
    "stop": "send stop_sequences",
    "n": "send one request for each answer",
    "logit_bias": "use chat completions",
    "response_format": "send output_config.format",
    "logprobs": "use chat completions",
    "top_logprobs": "use chat completions",
    "presence_penalty": "use chat completions",
    "frequency_penalty": "use chat completions",
    "repetition_penalty": "use chat completions",
    "chat_template_kwargs": "send thinking",
    "reasoning_effort": "send output_config.effort",
}


class SystemBlock(Markable):
    """A part of the system prompt."""

    type: Literal["text"]
    text: str


class Thinking(msgspec.Struct):
    """Whether the model shall think, and whether it is shown what it thought."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=_LEAST_BUDGET)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    """What the content must be."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """How much is thought, and what the content must be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Edit(msgspec.Struct):
    """Something to leave out of the conversation."""

    type: str
    keep: Any = None

    def kept_turns(self) -> int | None:
        """How many turns keep what was thought; None for all.

        Raises:
            APIError: 400 for what is not supported, or makes no sense.
        """
        place = "context_management.edits"
        if self.type != _CLEAR_THINKING:
            raise unsupported(f"{place} of type {quote(self.type)}", f"send {_CLEAR_THINKING} only")
        match self.keep:
            case None:
                return 1
            case "all" | {"type": "all"}:
                return None
            case {"type": "thinking_turns", "value": int(value)} if value >= 1:
                return value
        message = f"{place}: keep is 'all', or a number of thinking_turns of at least 1"
        raise APIError(400, message, param=place)


class ContextManagement(msgspec.Struct):
    """What to leave out of the conversation."""

    edits: Annotated[list[Edit], Meta(max_length=MAX_EDITS)] | None = None


class Metadata(msgspec.Struct):
    """About the request."""

    user_id: str | None = None


class _UserId(msgspec.Struct):
    """What Claude Code writes into `user_id`."""

    session_id: Annotated[str, Meta(min_length=1, max_length=MAX_KEY)]


class MessagesFields(GenerationBody, kw_only=True):
    """The fields of both endpoints. Each message and each tool is decoded on its own."""

    messages: Annotated[list[Raw], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Tokens | None = None
    system: str | Annotated[list[SystemBlock], Meta(max_length=MAX_BLOCKS)] | None = None
    tools: ToolList | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    stop_sequences: Annotated[list[StopSequence], Meta(max_length=MAX_STOP_SEQUENCES)] | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    container: Any = None
    mcp_servers: Any = None
    thread: Any = None
    seed: Any = None
    min_p: Any = None
    stop: Any = None
    n: Any = None
    logit_bias: Any = None
    response_format: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None

    @property
    def session_name(self) -> str | None:
        """The session in `metadata.user_id`, which Claude Code writes there as JSON."""
        user = self.metadata.user_id if self.metadata else None
        if not user or len(user) > MAX_USER_ID:
            return None
        try:
            name = msgspec.json.decode(user, type=_UserId).session_id
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        return name if name.isprintable() else None

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer has the text of what the model thought."""
        return self.thinking is None or self.thinking.display != "omitted"

    def refuse_unsupported(self) -> None:
        """Refuse what would change the answer and cannot be done."""
        for field in ("container", "mcp_servers"):
            if getattr(self, field):
                raise unsupported(field, "send tools that the client runs")
        for field, advice in _FOREIGN.items():
            if getattr(self, field) is not None:
                raise unsupported(field, advice)
        if self.thread is not None:
            message = "thread is not supported; send all messages"
            raise APIError(400, message, code=THREADS_UNSUPPORTED, param="thread")
        if self.output_format and self.output_config and self.output_config.format:
            message = "send one of output_config.format and output_format"
            raise APIError(400, message, param="output_format")
        thinking, most = self.thinking, self.max_tokens
        if thinking is None or thinking.type != "enabled" or thinking.budget_tokens is None:
            return
        if most is not None and thinking.budget_tokens >= most:
            message = "max_tokens must be greater than thinking.budget_tokens"
            raise APIError(400, message, param="max_tokens")

    def release(self) -> None:
        """Let go of messages and tools, which are views of the body."""
        self.messages, self.tools = [], None

    def generation_request(self, check: Check) -> GenerationRequest:
        """Read the whole body; see `GenerationBody`."""
        return GenerationRequest(
            prompts=[self.read_conversation(check)],
            sampling=SamplingParams(
                seed=secrets.randbits(64),
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=self.top_k or 0,
            ),
            max_tokens=self.max_tokens,
            stops=self.stop_sequences or [],
            constraint=self._constraint(),
        )

    def read_conversation(self, check: Check) -> Conversation:
        """Read messages and tools, one by one.

        Raises:
            APIError: 400, naming what is wrong.
        """
        reader = MessageReader()
        system = self.system or []
        if isinstance(system, str):
            system = [SystemBlock(type="text", text=system)]
        reader.system([(block.text, block.cache_control is not None) for block in system])
        for index, raw in enumerate(self.messages):
            check()
            reader.add(raw, f"messages[{index}]")
        if not reader.messages:
            raise APIError(400, "messages have no text; send a user's", param="messages")
        if reader.messages[-1].role == "assistant":
            message = (
                "an assistant's last message is not continued; the conversation must end with "
                "a user's"
            )
            raise APIError(400, message, param="messages")
        managed = self.context_management or ContextManagement()
        for turns in [edit.kept_turns() for edit in managed.edits or []]:
            if turns is not None:
                reader.keep_thinking(turns)
        tools, hints = read_tools(self.tools or [], reader.removed, check)
        return Conversation(
            messages=reader.messages,
            tools=tools,
            tool_choice=read_choice(self.tool_choice, tools),
            options=self._options(),
            hints=hints + reader.hints,
        )

    def _options(self) -> dict[str, Any]:
        """What the template is told of thinking; without a word of it, its own default holds."""
        effort = self.output_config.effort if self.output_config else None
        thinking = None if self.thinking is None else self.thinking.type in ("enabled", "adaptive")
        return read_options(None, effort, thinking=thinking)

    def _constraint(self) -> Constraint | None:
        wanted = self.output_format or (self.output_config and self.output_config.format)
        return JSONSchema(wanted.schema) if wanted else None


class CountRequest(MessagesFields, kw_only=True):
    """The body of a count: what a message's has, and nothing is generated."""


class MessagesRequest(MessagesFields, kw_only=True):
    """The body of a message."""

    def refuse_unsupported(self) -> None:
        """Refuse what cannot be done, and a body without a bound."""
        super().refuse_unsupported()
        if self.max_tokens is None:
            raise APIError(400, "max_tokens: Field required", param="max_tokens")
