"""Tools of Anthropic's messages, and the choice among them."""

from collections.abc import Container, Sequence
from itertools import accumulate
from typing import Any, Literal

import msgspec
import structlog
from msgspec import Raw

from ...models.text.conversation import CacheHint, Tool, ToolChoice
from ..http.decoding import decode_part
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check
from .cache_control import Markable
from .generation_request import unsupported
from .tools import checked, choose

log = structlog.get_logger()

# Tools that Anthropic defines, by how their types begin: agents offer them to every server.
_ANTHROPICS = (
    "advisor_",
    "bash_",
    "browser_",
    "code_execution_",
    "computer_",
    "mcp_toolset",
    "memory_",
    "text_editor_",
    "tool_search_tool",
    "web_fetch_",
    "web_search_",
)


class MessagesTool(Markable):
    """A tool's definition. What else it may have changes no answer."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self, place: str) -> Tool:
        """Turn it into what a template is told of.

        Raises:
            APIError: 400, it has no schema.
        """
        if self.input_schema is None:
            param = f"{place}.input_schema"
            raise APIError(400, f"{param}: Field required", param=param)
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=self.input_schema or {"type": "object", "properties": {}},
            strict=bool(self.strict),
        )


class MessagesToolChoice(msgspec.Struct):
    """Which tools an answer may, or must, ask for."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def read_tools(
    raws: Sequence[Raw], removed: Container[str], check: Check
) -> tuple[list[Tool], list[CacheHint]]:
    """Read the tools one by one; leave out those that Anthropic defines.

    Args:
        raws: their definitions.
        removed: names of tools that are not offered any more.
        check: called between two tools; raises what ends the work.

    Returns:
        The tools that are offered, and where those are among them that are marked for the cache.

    Raises:
        APIError: 400, naming the tool.
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


def read_choice(choice: MessagesToolChoice | None, tools: Sequence[Tool]) -> ToolChoice:
    """Read the choice of tools.

    Raises:
        APIError: 400, a call is asked for and there is no such tool.
    """
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
