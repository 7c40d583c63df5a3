"""A conversation, in the form to which each protocol's requests are converted.

Plain data: chat templates render a conversation; grammars are compiled from a constraint.
"""

from typing import Any, Literal, NamedTuple

import msgspec

Role = Literal["system", "user", "assistant", "tool"]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may ask to be called.

    Attributes:
        parameters: JSON schema of its arguments, an object.
        strict: the arguments must match the schema.
        place: path of the schema in the request; errors in the schema name it.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False
    place: str = "parameters"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of an earlier answer, as the client sends it back; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, kw_only=True):
    """One message.

    Attributes:
        reasoning: an assistant's thoughts before it, if the client sends them back.
        tool_call_id: of a tool's message, the call that it answers; `name` is that call's tool.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    name: str | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that an answer may or must call.

    Attributes:
        mode: `none`: text only. `auto`: the model decides. `required`: at least one call.
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
    """End of the part that the client expects other requests to share. It changes no prompt.

    Attributes:
        message: index of the message in which it stands; None if it stands among the tools.
        end: characters of that message's content, or tools, before it. A hint at the end of the
            content stands after the whole message, calls included.
    """

    message: int | None
    end: int


class Conversation(msgspec.Struct, kw_only=True):
    """Input of a chat template: one or more messages, and the tools.

    Attributes:
        options: further variables of the template, such as `enable_thinking`.
        hints: in the order of the request's body.
    """

    messages: list[Message]
    tools: list[Tool] = []
    tool_choice: ToolChoice = ToolChoice()
    options: dict[str, Any] = {}
    hints: list[CacheHint] = []


class JSONObject(msgspec.Struct, frozen=True):
    """Any JSON object."""


class JSONSchema(msgspec.Struct, frozen=True):
    """A JSON text that matches a schema."""

    schema: dict[str, Any] | bool


class Regex(msgspec.Struct, frozen=True):
    """A text that a pattern of Rust's `regex` crate matches as a whole."""

    pattern: str


class Choice(msgspec.Struct, frozen=True):
    """One of several texts."""

    options: list[str]


Constraint = JSONObject | JSONSchema | Regex | Choice


class ToolCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of tools, written so that `output.OutputParser` reads them.

    Attributes:
        tools: the tools that may be called.
        form: of the calls: one of `grammar.calls.FORMS`.
        forced: the answer consists of calls whose arguments match their tools' schemas. Otherwise
            it is text with calls in it; the arguments of `strict` tools match their schemas, and
            those of other tools are any object.
        parallel: an answer may have several calls.
        content: constraint on an answer without calls; only if calls are not forced.
        starts: markers, of any form, at which a call is read: thoughts have none of them, and text
            has only the marker of `form`.
    """

    tools: list[Tool]
    form: str
    forced: bool
    parallel: bool = True
    content: Constraint | None = None
    starts: list[str] = []


class Reasoning(NamedTuple):
    """Markers of a model's thoughts, which are not constrained.

    Attributes:
        opened: the prompt ends inside the thoughts; otherwise an answer may have none.
    """

    start: str
    end: str
    opened: bool
