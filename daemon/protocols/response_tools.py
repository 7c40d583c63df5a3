"""Tools of a response: functions, namespaces of them, and custom ones that take a text."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import structlog
from msgspec import Meta, Raw

from ...models.text.conversation import Tool, ToolChoice
from ..http.bodies import decode_part
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check
from .generation_request import unsupported
from .response_items import internal_name, unsupported_kind
from .tools import MAX_TOOLS, checked, choose, read_choice, tool_of

log = structlog.get_logger()

# Run by OpenAI, or trained into its models: they are left out.
_HOSTED = frozenset(
    {
        *("apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview"),
        *("file_search", "image_generation", "local_shell", "mcp", "programmatic_tool_calling"),
        *("shell", "tool_search", "web_search", "web_search_preview"),
    }
)
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class CalledTool(NamedTuple):
    """A tool as the client knows it; a custom one takes a text in place of arguments."""

    name: str
    namespace: str | None = None
    custom: bool = False


class ResponseTools(NamedTuple):
    """The tools of one request.

    Attributes:
        tools: as the model knows them.
        called: as the client knows them, by the model's names.
        shown: the JSON of those that are offered, as the client sent it.
    """

    tools: list[Tool]
    called: dict[str, CalledTool]
    shown: list[Raw]


class _CustomFormat(msgspec.Struct):
    """The format of a custom tool's text. The prompt describes it; nothing enforces it."""

    type: str = "text"
    syntax: str = ""
    definition: str = ""

    def described(self, place: str) -> str:
        """Describe the format in words; empty for any text."""
        if self.type == "text":
            return ""
        if self.type == "grammar":
            return f"The input matches this {self.syntax} grammar:\n{self.definition}"
        raise unsupported(f"{place}.format of type {quote(self.type)}", "send text or grammar")


class _ResponseTool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: _CustomFormat | None = None
    tools: Annotated[list[Raw], Meta(max_length=MAX_TOOLS)] | None = None


_Found = tuple[Tool, CalledTool, str]
"""A tool as the model and as the client know it, and its place in the body."""


def read_response_tools(raws: Sequence[Raw], check: Check) -> ResponseTools:
    """Read tools, one by one. Hosted ones are left out, with a log line."""
    found: list[_Found] = []
    shown, dropped = [], set()
    for index, raw in enumerate(raws):
        check()
        place = f"tools[{index}]"
        tool = decode_part(raw, _ResponseTool, place)
        if _is_hosted(tool.type):
            dropped.add(tool.type)
            continue
        found += _read(tool, place, check)
        shown.append(Raw(bytes(raw)))  # a view would keep the whole body
        if len(found) > MAX_TOOLS:
            raise APIError(400, f"there are over {MAX_TOOLS} tools; send fewer", param="tools")
    if dropped:
        log.info("hosted tools left out", types=",".join(sorted(dropped)))
    places = [place for _, _, place in found]
    tools = checked([tool for tool, _, _ in found], places, "parameters")
    return ResponseTools(tools, {tool.name: called for tool, called, _ in found}, shown)


def read_response_choice(
    choice: str | dict[str, Any] | None, tools: ResponseTools, *, parallel: bool | None
) -> tuple[list[Tool], ToolChoice]:
    """Return the tools that the prompt has, and the choice among them."""
    several = parallel is not False
    match choice:
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            kept = _allowed(allowed, tools)
            return kept, choose(mode, None, kept, parallel=several)
        case {"type": "custom" | "function", "name": str(name), **rest}:
            named = internal_name(name, _namespace(rest))
            return tools.tools, choose("required", named, tools.tools, parallel=several)
        case _:
            return tools.tools, read_choice(choice, tools.tools, parallel=parallel)


def _allowed(allowed: list[Any], tools: ResponseTools) -> list[Tool]:
    names = set()
    for entry in allowed[: MAX_TOOLS + 1]:
        said = entry.get("type") if isinstance(entry, dict) else entry
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            said = entry["name"]
            if (known := internal_name(said, _namespace(entry))) in tools.called:
                names.add(known)
                continue
        message = (
            f"tool_choice allows {quote(said)}, but tools does not have it; send names of "
            "functions that it has"
        )
        raise APIError(400, message, param="tool_choice")
    return [tool for tool in tools.tools if tool.name in names]


def _namespace(choice: Mapping[Any, Any]) -> str | None:
    namespace = choice.get("namespace")
    return namespace if isinstance(namespace, str) else None


def _is_hosted(kind: str) -> bool:
    # Versions of one tool end in their date.
    return kind in _HOSTED or kind.startswith(("web_search_", "code_interpreter_"))


def _read(tool: _ResponseTool, place: str, check: Check) -> list[_Found]:
    if tool.type != "namespace":
        return [_one(tool, place, None)]
    if not tool.name:
        raise APIError(400, f"{place} is a namespace without a name", param=f"{place}.name")
    found = []
    for index, raw in enumerate(tool.tools or []):
        check()
        inner = f"{place}.tools[{index}]"
        found.append(_one(decode_part(raw, _ResponseTool, inner), inner, tool.name))
    return found


def _one(tool: _ResponseTool, place: str, namespace: str | None) -> _Found:
    if tool.type not in ("function", "custom"):
        raise unsupported_kind(place, tool.type, "send functions, namespaces or custom tools")
    if tool.name is None:
        raise APIError(400, f"{place} has no name", param=f"{place}.name")
    custom = tool.type == "custom"
    described = tool.description
    if custom and tool.format is not None:
        described = "\n\n".join(filter(None, [described, tool.format.described(place)]))
    name = internal_name(tool.name, namespace)
    parameters = _CUSTOM_PARAMETERS if custom else tool.parameters
    known = tool_of(name, described, parameters, strict=tool.strict)
    return known, CalledTool(tool.name, namespace, custom), place
