"""Tools: definitions, the choice among them, and results, alike in all protocols."""

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from ...models.errors import GrammarError
from ...models.text.conversation import Message, Tool, ToolChoice
from ...models.text.grammar.schema_check import measure, mended
from ..http.bodies import decode_part
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check
from .generation_request import unsupported

MAX_TOOLS = 1024
_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")

ToolList = Annotated[list[Raw], Meta(max_length=MAX_TOOLS)]


class Function(msgspec.Struct):
    """A function's definition in a chat completion."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _ChatTool(msgspec.Struct):
    type: str
    function: Function | None = None


def tool_of(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None
) -> Tool:
    """Make the tool that a template renders; without parameters, it takes none."""
    return Tool(
        name=name,
        description=description or "",
        parameters=parameters or {"type": "object", "properties": {}},
        strict=bool(strict),
    )


def read_chat_tools(raws: Sequence[Raw], check: Check) -> list[Tool]:
    """Read the tools of a chat completion, one by one."""
    tools = []
    for index, raw in enumerate(raws):
        check()
        place = f"tools[{index}]"
        tool = decode_part(raw, _ChatTool, place)
        if tool.type != "function":
            raise unsupported(f"{place} of type {quote(tool.type)}", "send functions only")
        if tool.function is None:
            raise APIError(400, f"{place} has no function; name one", param=place)
        sent = tool.function
        tools.append(tool_of(sent.name, sent.description, sent.parameters, strict=sent.strict))
    return checked(tools, [f"tools[{index}]" for index in range(len(tools))], "function.parameters")


def checked(tools: Sequence[Tool], places: Sequence[str], field: str) -> list[Tool]:
    """Check names and schemas of tools; slips in schemas are mended.

    Args:
        tools: to check.
        places: of each tool in the body.
        field: of a tool in the body that has its schema.
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
        # Anthropic's way to write places: Claude Code looks for it.
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
    """Make the error for a tool's schema; the grammar error's place names it."""
    return APIError(400, str(error), code="invalid_schema", param=error.place)


def choose(
    mode: Literal["none", "auto", "required"],
    name: str | None,
    tools: Sequence[Tool],
    *,
    parallel: bool,
) -> ToolChoice:
    """Check a choice against the tools; without tools nothing is called."""
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
    """Read the tool choice of OpenAI's protocols."""
    several = parallel is not False
    match choice:
        case None | "auto":
            return choose("auto", None, tools, parallel=several)
        case "none" | "required":
            return choose(choice, None, tools, parallel=several)
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "function",
            "name": str(name),
        }:
            return choose("required", name, tools, parallel=several)
        case _:
            said = choice if isinstance(choice, str) else choice.get("type")
            message = f"tool_choice is {quote(said)}; send none, auto, required, or name a function"
            raise APIError(400, message, param="tool_choice")


def arguments_text(sent: Any) -> str:
    """Write the arguments of a call in the history as JSON text; clients send text or values."""
    if sent is None:
        return "{}"
    return sent if isinstance(sent, str) else msgspec.json.encode(sent).decode()


def check_results(messages: Iterable[Message]) -> None:
    """Name the tool of each result; refuse a result whose call no earlier message has."""
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
