"""Tools as every protocol defines them, chooses them, and sends back what came of them."""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from ...models.errors import GrammarError
from ...models.text.conversation import Message, Tool, ToolChoice
from ...models.text.grammar.schema_check import measure, mended
from ..http.decoding import decode_part
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check
from .generation_request import unsupported

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")

ToolList = Annotated[list[Raw], Meta(max_length=MAX_TOOLS)]


class Function(msgspec.Struct):
    """A function's definition, as OpenAI's protocols write it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """Turn it into what a template is told of."""
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=self.parameters or {"type": "object", "properties": {}},
            strict=bool(self.strict),
        )


class _ChatTool(msgspec.Struct):
    type: str
    function: Function | None = None


def read_chat_tools(raws: Sequence[Raw], check: Check) -> list[Tool]:
    """Read the tools of a chat completion, one by one.

    Raises:
        APIError: 400 for a tool of another kind, and for what `checked` refuses.
    """
    tools = []
    for index, raw in enumerate(raws):
        check()
        tool = decode_part(raw, _ChatTool, f"tools[{index}]")
        if tool.type != "function":
            raise unsupported(f"tools[{index}] of type {quote(tool.type)}", "send functions only")
        if tool.function is None:
            message = f"tools[{index}] has no function; name one"
            raise APIError(400, message, param=f"tools[{index}]")
        tools.append(tool.function.tool())
    places = [f"tools[{index}]" for index in range(len(tools))]
    return checked(tools, places, "function.parameters")


def checked(tools: Sequence[Tool], places: Sequence[str], field: str) -> list[Tool]:
    """Refuse names that are none, or are there twice; mend slips in schemas, and measure these.

    Args:
        tools: to check.
        places: where each stands in the body.
        field: of a tool in the body, which has its schema.

    Raises:
        APIError: 400, naming the tool.
    """
    seen: set[str] = set()
    found = []
    for tool, place in zip(tools, places, strict=True):
        if not _NAME.fullmatch(tool.name):
            message = f"{place} is named {quote(tool.name)}; send 1 to 128 letters, digits or _.:/-"
            raise APIError(400, message, param=place)
        if tool.name in seen:
            raise APIError(400, f"{place}: there are two tools {quote(tool.name)}", param=place)
        seen.add(tool.name)
        # As Anthropic writes places, and Claude Code looks for them.
        at = f"{place.replace('[', '.').replace(']', '')}.{field}"
        try:
            measure(tool.parameters, at)
        except GrammarError as error:
            raise schema_refusal(error) from error
        schema = mended(tool.parameters)
        parameters = schema if isinstance(schema, dict) else tool.parameters
        found.append(msgspec.structs.replace(tool, parameters=parameters, place=at))
    return found


def schema_refusal(error: GrammarError) -> APIError:
    """Refuse a tool's schema; the error's place names it."""
    return APIError(400, str(error), code="invalid_schema", param=error.place)


def choose(
    mode: Literal["none", "auto", "required"],
    name: str | None,
    tools: Sequence[Tool],
    *,
    parallel: bool,
) -> ToolChoice:
    """Check a choice of tools against those that there are.

    Raises:
        APIError: 400, a call is asked for and there is no such tool.
    """
    if name is not None and name not in {tool.name for tool in tools}:
        message = (
            f"tool_choice names {quote(name)}, but tools does not, among those that the client "
            "runs; send one of their names"
        )
        raise APIError(400, message, param="tool_choice")
    if mode == "required" and not tools:
        message = "tool_choice asks for a call, but there are no tools that the client runs"
        raise APIError(400, f"{message}; send some", param="tool_choice")
    return ToolChoice(mode=mode if tools else "none", name=name, parallel=parallel)


def read_choice(
    choice: str | dict[str, Any] | None, tools: Sequence[Tool], *, parallel: bool | None
) -> ToolChoice:
    """Read the tool choice of OpenAI's protocols.

    Raises:
        APIError: 400 for what is no choice, or names no tool.
    """
    several = parallel is not False
    match choice:
        case None | "auto":
            return choose("auto", None, tools, parallel=several)
        case "none" | "required":
            return choose(choice, None, tools, parallel=several)
        case {"type": "function", "function": {"name": str(name)}}:
            return choose("required", name, tools, parallel=several)
        case {"type": "function", "name": str(name)}:
            return choose("required", name, tools, parallel=several)
        case _:
            said = choice if isinstance(choice, str) else choice.get("type")
            message = f"tool_choice is {quote(said)}; send none, auto, required, or name a function"
            raise APIError(400, message, param="tool_choice")


def arguments_text(sent: Any) -> str:
    """Write the arguments of a call in the history as JSON text, in whatever way they are sent."""
    if sent is None:
        return "{}"
    return sent if isinstance(sent, str) else msgspec.json.encode(sent).decode()


def check_results(messages: Iterable[Message]) -> None:
    """Refuse results of calls that no message before them asked for; name the tools of others.

    Raises:
        APIError: 400, naming the message.
    """
    called: dict[str, str] = {}
    for index, message in enumerate(messages):
        called.update({call.id: call.name for call in message.tool_calls})
        if message.role != "tool":
            continue
        if message.tool_call_id not in called:
            words = (
                f"messages[{index}] is the result of a call {quote(message.tool_call_id)} that no "
                "message before it asks for; send the assistant's message with that call too"
            )
            raise APIError(400, words, param=f"messages[{index}].tool_call_id")
        message.name = called[message.tool_call_id]
