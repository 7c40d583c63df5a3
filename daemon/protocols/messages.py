"""Anthropic's messages: the bodies of `POST /v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Container, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

import msgspec
import structlog
from msgspec import Meta, Raw

from ...models.text.conversation import CacheHint, Conversation, JSONSchema, Tool, ToolChoice
from ..http.bodies import decode_part
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check
from .chat import MAX_MESSAGES
from .content import CacheControl, Markable
from .errors import THREADS_UNSUPPORTED
from .generation_request import (
    EMPTY,
    MAX_KEY,
    GenerationBody,
    GenerationRequest,
    Probability,
    Refused,
    StopSequences,
    Tokens,
    template_options,
    unsupported,
)
from .messages_content import MAX_BLOCKS, MessageReader
from .tools import ToolList, checked, choose, tool_of

log = structlog.get_logger()

MAX_USER_ID = 2048
MAX_EDITS = 16
_LEAST_BUDGET = 1024
_CLEAR_THINKING = "clear_thinking_20251015"
# Types of tools that Anthropic defines begin so; agents offer these tools to every server.
_ANTHROPICS = (
    *("advisor_", "bash_", "browser_", "code_execution_", "computer_", "mcp_toolset", "memory_"),
    *("text_editor_", "tool_search_tool", "web_fetch_", "web_search_"),
)
_CLIENT_TOOLS = Refused("send tools that the client runs", EMPTY)
_CHAT = Refused("use chat completions")


class MessagesTool(Markable):
    """A tool's definition; members that are not here change no answer."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self, place: str) -> Tool:
        """Make the tool that a template renders."""
        if self.input_schema is None:
            param = f"{place}.input_schema"
            raise APIError(400, f"{param}: Field required", param=param)
        return tool_of(self.name, self.description, self.input_schema, strict=self.strict)


class MessagesToolChoice(msgspec.Struct):
    """The tools that an answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class SystemBlock(Markable):
    """A part of the system prompt."""

    type: Literal["text"]
    text: str


class Thinking(msgspec.Struct):
    """Switches thinking on or off, and hides its text."""

    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=_LEAST_BUDGET)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    """The JSON schema of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """Effort of thinking, and format of the text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Edit(msgspec.Struct):
    """An edit of the conversation."""

    type: str
    keep: Any = None

    def kept_turns(self) -> int | None:
        """Return how many turns keep their thinking; None for all."""
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
    """Edits of the conversation."""

    edits: Annotated[list[Edit], Meta(max_length=MAX_EDITS)] | None = None


class Metadata(msgspec.Struct):
    """About the request."""

    user_id: str | None = None


class _UserId(msgspec.Struct):
    """Claude Code's JSON in `user_id`."""

    session_id: Annotated[str, Meta(min_length=1, max_length=MAX_KEY)]


class CountRequest(GenerationBody, kw_only=True):
    """The body of a count. Each message and each tool is decoded on its own."""

    messages: Annotated[list[Raw], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Tokens | None = None
    system: str | Annotated[list[SystemBlock], Meta(max_length=MAX_BLOCKS)] | None = None
    tools: ToolList | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    stop_sequences: StopSequences | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    thread: Any = None

    container: Annotated[Any, _CLIENT_TOOLS] = None
    mcp_servers: Annotated[Any, _CLIENT_TOOLS] = None
    # OpenAI's fields that would change the answer.
    seed: Annotated[Any, _CHAT] = None
    min_p: Annotated[Any, _CHAT] = None
    stop: Annotated[Any, Refused("send stop_sequences")] = None
    n: Annotated[Any, Refused("send one request for each answer")] = None
    logit_bias: Annotated[Any, _CHAT] = None
    response_format: Annotated[Any, Refused("send output_config.format")] = None
    logprobs: Annotated[Any, _CHAT] = None
    top_logprobs: Annotated[Any, _CHAT] = None
    presence_penalty: Annotated[Any, _CHAT] = None
    frequency_penalty: Annotated[Any, _CHAT] = None
    repetition_penalty: Annotated[Any, _CHAT] = None
    chat_template_kwargs: Annotated[Any, Refused("send thinking")] = None
    reasoning_effort: Annotated[Any, Refused("send output_config.effort")] = None

    @property
    def session_name(self) -> str | None:
        """The session in `metadata.user_id`, where Claude Code writes it as JSON."""
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
        """True if the answer has the text of the model's thinking."""
        return self.thinking is None or self.thinking.display != "omitted"

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the answer and are not served."""
        super().refuse_unsupported()
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
        """Drop messages and tools, which are views of the body."""
        self.messages, self.tools = [], None

    def generation_request(self, check: Check) -> GenerationRequest:
        """Read the whole body; see `GenerationBody`."""
        wanted = self.output_format or (self.output_config and self.output_config.format)
        return GenerationRequest(
            prompts=[self._conversation(check)],
            sampling=self.sampling(),
            max_tokens=self.max_tokens,
            stops=self.stop_sequences or [],
            constraint=JSONSchema(wanted.schema) if wanted else None,
        )

    def _conversation(self, check: Check) -> Conversation:
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
        tools, hints = _tools(self.tools or [], reader.removed, check)
        effort = self.output_config.effort if self.output_config else None
        thinking = None if self.thinking is None else self.thinking.type in ("enabled", "adaptive")
        return Conversation(
            messages=reader.messages,
            tools=tools,
            tool_choice=_choice(self.tool_choice, tools),
            options=template_options(None, effort, thinking=thinking),
            hints=hints + reader.hints,
        )


class MessagesRequest(CountRequest, kw_only=True):
    """The body of a message."""

    def refuse_unsupported(self) -> None:
        """Refuse fields that are not served, and a body without a bound."""
        super().refuse_unsupported()
        if self.max_tokens is None:
            raise APIError(400, "max_tokens: Field required", param="max_tokens")


def _tools(
    raws: Sequence[Raw], removed: Container[str], check: Check
) -> tuple[list[Tool], list[CacheHint]]:
    """Read tools one by one, without those that Anthropic defines or messages have removed.

    Returns:
        The tools, and the cache marks among them.
    """
    tools, places, left_out, ends = list[Tool](), list[str](), [], []
    for index, raw in enumerate(raws):
        check()
        place = f"tools[{index}]"
        tool = decode_part(raw, MessagesTool, place)
        if tool.type in (None, "custom"):
            tools.append(tool.tool(place))
            places.append(place)
        elif tool.type.startswith(_ANTHROPICS):
            left_out.append(quote(tool.type))
        else:
            raise unsupported(f"{place} of type {quote(tool.type)}", "send tools of type custom")
        if tool.cache_control is not None:
            ends.append(len(tools))
    if left_out:
        log.info("tools left out", types=" ".join(left_out[:10]), count=len(left_out))
    offered = [tool for tool in checked(tools, places, "input_schema") if tool.name not in removed]
    counts = [0, *accumulate(tool.name not in removed for tool in tools)]
    return offered, [CacheHint(None, counts[end]) for end in ends if counts[end]]


def _choice(choice: MessagesToolChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    if choice is None:
        return choose("auto", None, tools, parallel=True)
    parallel = not choice.disable_parallel_tool_use
    match choice.type:
        case "auto" | "none":
            return choose(choice.type, None, tools, parallel=parallel)
        case "any":
            return choose("required", None, tools, parallel=parallel)
        case "tool":
            if choice.name is None:
                message = "tool_choice.name: Field required"
                raise APIError(400, message, param="tool_choice.name")
            return choose("required", choice.name, tools, parallel=parallel)
