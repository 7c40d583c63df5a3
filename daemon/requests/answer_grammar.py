"""The grammar of an answer: from its request, and from the way its model writes calls."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...models.errors import GrammarError
from ...models.params import Grammar
from ...models.text.conversation import Constraint, Conversation, Reasoning, ToolCalls
from ...models.text.formats import NORMAL
from ...models.text.grammar.calls import call_form
from ...models.text.grammar.compiler import GrammarCompiler
from ...models.text.template import ChatTemplate
from ..http.failures import APIError
from ..protocols.tools import schema_refusal


class HeldTo(NamedTuple):
    """The constraints of an answer."""

    grammar: Grammar | None = None  # None if it is free
    guaranteed: bool = False  # each call can be read, so that it may be passed on as it comes
    constrained: bool = False  # the content matches the request's constraint


def text_grammar(
    compiler: GrammarCompiler, constraint: Constraint | None, tenant: str
) -> Grammar | None:
    """Compile the grammar of a tenant's text completion; None if it is free.

    Raises:
        APIError: 400, the constraint cannot be honoured.
    """
    return None if constraint is None else _compile(compiler, tenant, constraint, None)


def conversation_grammar(
    compiler: GrammarCompiler,
    template: ChatTemplate,
    conversation: Conversation,
    constraint: Constraint | None,
    tenant: str,
    *,
    opened: bool,
) -> HeldTo:
    """Compile the grammar of an answer in a conversation, its calls included.

    Args:
        compiler: of the model.
        template: of the model.
        conversation: has the tools and the choice among them.
        constraint: for the content.
        tenant: of the request; grammars compiled for others are not reused.
        opened: the prompt ends inside the model's thoughts.

    Raises:
        APIError: 400, the constraint or a tool's schema cannot be honoured.
    """
    wanted = _wanted(template, conversation, constraint)
    if wanted is None:
        return HeldTo()
    calls = wanted if isinstance(wanted, ToolCalls) else None
    constrained = calls is None or calls.content is not None
    edges = template.form.edges(NORMAL, calls=calls is not None)
    markers = sorted(edges.targets) if constrained else []
    reasoning = _reasoning(template, conversation, opened=opened)
    grammar = _compile(compiler, tenant, wanted, reasoning, template.form.content_start, markers)
    return HeldTo(grammar, calls is not None, constrained)


def _wanted(
    template: ChatTemplate, conversation: Conversation, constraint: Constraint | None
) -> Constraint | ToolCalls | None:
    choice, tools = conversation.tool_choice, conversation.tools
    if choice.name is not None:
        tools = [tool for tool in tools if tool.name == choice.name]
    own = template.form.tools
    form = call_form(own.name if own is not None and template.abilities.tools else None)
    calls = ToolCalls(
        tools=tools,
        form=form,
        forced=choice.mode == "required",
        parallel=not choice.one_call,
        starts=sorted(template.form.barred),
    )
    if choice.mode == "required":
        return calls
    if choice.mode == "none" or not tools:
        return constraint
    if constraint is not None:
        return msgspec.structs.replace(calls, content=constraint)
    return calls if any(tool.strict for tool in tools) else None


def _reasoning(
    template: ChatTemplate, conversation: Conversation, *, opened: bool
) -> Reasoning | None:
    markers = template.form.reasoning
    if markers is None:
        return None
    switched_off = conversation.options.get("enable_thinking") is False
    if switched_off and template.abilities.thinking_switch and not opened:
        return None  # the prompt has said that there are no thoughts
    return Reasoning(markers.start, markers.end + markers.then, opened)


def _compile(
    compiler: GrammarCompiler,
    tenant: str,
    wanted: Constraint | ToolCalls,
    reasoning: Reasoning | None,
    header: str = "",
    markers: Sequence[str] = (),
) -> Grammar:
    try:
        return compiler.compile(
            wanted, scope=tenant, reasoning=reasoning, header=header, markers=markers
        )
    except GrammarError as error:
        raise _refusal(error) from error


def _refusal(error: GrammarError) -> APIError:
    if error.place.startswith("tools."):
        return schema_refusal(error)
    words = str(error).removeprefix(f"{error.place}: ") if error.place else str(error)
    place = f"the schema at {error.place}" if error.place else "the answer cannot be held to this"
    return APIError(400, f"{place}: {words}", code="invalid_schema", param="response_format")
