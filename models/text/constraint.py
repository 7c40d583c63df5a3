"""What an answer's content must match: plain data, compiled elsewhere."""

from typing import Any, NamedTuple

import msgspec

from .conversation import Tool


class JSONObject(msgspec.Struct, frozen=True):
    """Any JSON object."""


class JSONSchema(msgspec.Struct, frozen=True):
    """A JSON text that a schema describes."""

    schema: dict[str, Any] | bool


class Regex(msgspec.Struct, frozen=True):
    """A text that a regular expression matches from its first character to its last.

    Attributes:
        pattern: in the syntax of Rust's `regex` crate: no look-around, no back-references.
    """

    pattern: str


class Choice(msgspec.Struct, frozen=True):
    """One of some texts."""

    options: list[str]


Constraint = JSONObject | JSONSchema | Regex | Choice


class ToolCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of tools, written as the output's parser reads them.

    Attributes:
        tools: those that may be called.
        form: how calls are written: one of `call_grammar.FORMS`.
        forced: the answer is a call, or several, and each one's arguments match its tool's
            schema. Else the answer is text in which calls may stand, and what begins like a call
            is one: the arguments of `strict` tools match, those of others are any object.
        parallel: there may be several.
        content: what the answer must match where it is no call; only if calls are not forced.
        starts: markers at which a call is read, of other forms too: thoughts have none of them,
            and text none but that of `form`.
    """

    tools: list[Tool]
    form: str
    forced: bool
    parallel: bool = True
    content: Constraint | None = None
    starts: list[str] = []


class Reasoning(NamedTuple):
    """How a model marks what it thinks before it answers, which is not constrained.

    Attributes:
        start: begins the thinking, as `<think>`.
        end: ends it.
        opened: whether the prompt ends inside the thinking already; else it may be left out.
    """

    start: str
    end: str
    opened: bool
