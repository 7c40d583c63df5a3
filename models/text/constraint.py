"""What an answer's content must match: plain data, compiled elsewhere."""

from typing import Any

import msgspec


class JSONObject(msgspec.Struct, frozen=True):
    """Any JSON object."""


class JSONSchema(msgspec.Struct, frozen=True):
    """A JSON text that a schema describes."""

    schema: dict[str, Any] | bool


class Regex(msgspec.Struct, frozen=True):
    """A text that a regular expression matches from its first character to its last."""

    pattern: str


class Choice(msgspec.Struct, frozen=True):
    """One of some texts."""

    options: list[str]


Constraint = JSONObject | JSONSchema | Regex | Choice
