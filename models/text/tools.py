"""Tools and calls as chat templates take them, and the generic form for templates without tools.

In the generic form, the system prompt ends with the tools' definitions in the client's order, one
JSON object a line: requests with the same tools share the whole system prompt, and requests with
other tools share its text. A call is, in the assistant's text,

    <tool_call>
    {"name": "f", "arguments": {…}}
    </tool_call>

and a tool's result is a user message; results that follow each other share one message:

    <tool_response>
    …
    </tool_response>
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from .conversation import Message, Tool, ToolCall
from .json_text import close_json, whole_characters

_BEFORE = """\
# Functions

You can call functions. Each line between the tags describes one as JSON: its name, what it does, \
and a JSON schema of its arguments.
<tools>
"""
_AFTER = """
</tools>

To call a function, write this, with its name and its arguments, and nothing after it:
<tool_call>
{"name": "the name", "arguments": {"an argument": "its value"}}
</tool_call>
To call several, write one block for each. What they return comes back between <tool_response> \
and </tool_response>. Call none where you can answer without."""


def openai_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Write tools as OpenAI's chat completions do, which is how templates take them."""
    return [{"type": "function", "function": _function(tool)} for tool in tools]


def native_call(call: ToolCall, call_id: str, *, as_text: bool) -> dict[str, Any]:
    """Write a call as templates take it, with its arguments as JSON text or as an object.

    Arguments that must be an object and are none are still written, so that the model can correct
    itself: a truncated object is closed; other text becomes `{"arguments": "[1]"}`.
    """
    text = call.arguments.strip() or "{}"
    function = {"name": call.name, "arguments": text if as_text else _object(text)}
    return {"id": call_id, "type": "function", "function": function}


def _object(arguments: str) -> dict[str, Any]:
    whole = whole_characters(arguments.encode())
    known = arguments if whole is None else whole.decode()
    for text in (known, close_json(known) if known.startswith("{") else known):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
        if found is None:
            return {}
    return {"arguments": arguments}


def definitions(tools: Sequence[Tool]) -> str:
    """Write the tools into the end of a system prompt, in the generic form."""
    lines = (json.dumps(_function(tool), ensure_ascii=False) for tool in tools)
    return _BEFORE + "\n".join(lines) + _AFTER


def with_calls(content: str, calls: Iterable[ToolCall]) -> str:
    """Write an earlier answer's text and calls in the generic form."""
    blocks = [content] if content else []
    for call in calls:
        name = json.dumps(call.name, ensure_ascii=False)
        body = f'{{"name": {name}, "arguments": {call.arguments or "{}"}}}'
        blocks.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(blocks)


def tool_results(messages: Iterable[Message]) -> str:
    """Write tools' messages in the generic form."""
    return "\n".join(f"<tool_response>\n{m.content}\n</tool_response>" for m in messages)


def _function(tool: Tool) -> dict[str, Any]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {"name": tool.name, "description": tool.description, "parameters": parameters}
