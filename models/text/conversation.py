"""A conversation as every protocol's requests become one, and what its answer must match.

Plain data: chat templates render the one, and grammars are compiled from the other.
"""

from typing import Any, Literal, NamedTuple

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may ask to be called.

    Attributes:
        parameters: a JSON schema of its arguments, an object.
        strict: its arguments must match the schema, whatever the model would write.
        place: where the client sent the schema; faults in it are named after that.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False
    place: str = "parameters"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of an earlier answer, as the client sends it back; its arguments are JSON text."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, kw_only=True):
    """One message.

    Attributes:
        reasoning: what an assistant thought before it, if the client sends that back.
        tool_calls: what an assistant asked for.
        tool_call_id: whose result a tool's message is.
        name: of the tool whose result this is, if it is known.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    name: str | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools an answer may, or must, ask for.

    Attributes:
        mode: `none`: text only. `auto`: as the model likes. `required`: at least one call.
        name: the one tool that must be called; only with `required`.
        parallel: an answer may have several calls.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True

    @property
    def one_call(self) -> bool:
        """True if an answer ends with its first call."""
        return self.name is not None or not self.parallel


class CacheHint(msgspec.Struct, frozen=True):
    """Where, says the client, ends what other requests will have too. It changes no prompt.

    Attributes:
        message: the index of the message that it stands in; None where it stands among the tools.
        end: the characters of that message's content, or the tools, that are before it. At the
            end of the content it stands behind the whole message, calls included.
    """

    message: int | None
    end: int


class Conversation(msgspec.Struct, kw_only=True):
    """Input of a chat template: at least one message, and the tools.

    Attributes:
        options: what else the template takes, as `enable_thinking` or `reasoning_effort`.
        hints: in the order of the body.
    """

    messages: list[Message]
    tools: list[Tool] = []
    tool_choice: ToolChoice = ToolChoice()
    options: dict[str, Any] = {}
    hints: list[CacheHint] = []


# -- what an answer must match --------------------------------------------------------------


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
        form: how calls are written: one of `grammar.calls.FORMS`.
        forced: the answer is a call, or several, and each one's arguments match its tool's
            schema. Else it is text in which calls may stand, and what begins like a call is one:
            the arguments of `strict` tools match, those of others are any object.
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
        opened: the prompt ends inside the thinking already; else it may be left out.
    """

    start: str
    end: str
    opened: bool
