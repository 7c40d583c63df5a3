"""Items of a response's input: one struct for all kinds, and the names of what is in them."""

import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from ..http.decoding import decode_part, decode_parts
from ..http.failures import APIError
from ..quoting import quote
from .chat import MAX_PARTS

MAX_ITEMS = 10_000
_Id = Annotated[str, Meta(min_length=1, max_length=256)]
_Parts = Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)]


HOSTED = frozenset(
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Items of tools that are left out, in a conversation that began elsewhere."""


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One item of any kind: `type` says which of the fields it has."""

    type: str | None = None
    id: _Id | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | _Parts | None = None
    call_id: _Id | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    output: str | _Parts | dict[str, Any] | None = None
    summary: _Parts | None = None
    encrypted_content: str | None = None


def new_id(prefix: str) -> str:
    """Name something that is sent to a client."""
    return f"{prefix}_{secrets.token_hex(24)}"


def internal_name(name: str, namespace: str | None) -> str:
    """Name a tool as the model knows it: names within a namespace are not its own."""
    return f"{namespace}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """Write the input of a custom tool as the arguments of the function that it is here."""
    return msgspec.json.encode({"input": text}).decode()


def split_input(raw: Raw) -> list[Raw]:
    """Split the input into its items; a text is a user's message.

    Raises:
        APIError: 400, it is neither, or has too many items; 413 for a text that is too large.
    """
    first = bytes(memoryview(raw)[:1])
    if first == b"[":
        return decode_parts(raw, MAX_ITEMS, "input")
    text = decode_part(raw, str, "input") if first == b'"' else None
    if text is None:
        decode_part(raw, str | list[Any], "input")
        raise APIError(400, "input is empty; send a text, or a list of items", param="input")
    item = InputItem(type="message", role="user", content=[{"type": "input_text", "text": text}])
    return [Raw(msgspec.json.encode(item))]


def unsupported_kind(place: str, kind: str | None, advice: str) -> APIError:
    """Say that an item or a tool is of a kind that nothing is known of."""
    message = f"{place} of type {quote(kind)} is not supported; {advice}"
    return APIError(400, message, code="unsupported_parameter", param=place)
