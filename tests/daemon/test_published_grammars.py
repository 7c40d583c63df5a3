"""Text that each published tokenizer may write, by request: tools, choice, format, thoughts.

The right answers are those that the model's template would show it, in the tokens in which it was
trained to write them.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import umbel.models  # noqa: F401  (before mlx.core, which the loader imports)
from umbel.daemon.requests.answer_grammar import HeldTo, conversation_grammar
from umbel.models.load.loader import load
from umbel.models.params import Grammar
from umbel.models.text.conversation import (
    Constraint,
    Conversation,
    JSONObject,
    JSONSchema,
    Message,
    Tool,
    ToolChoice,
)
from umbel.models.text.grammar.compiler import GrammarCompiler
from umbel.models.text.harmony import ANALYSIS, FINAL, NEXT
from umbel.models.text.output import OutputParser

from ..models.text.outputs import events_of, parts_of
from ..published import FAMILIES, NOTHING, ORDER, published_model_dir

pytestmark = pytest.mark.nightly

ORDERED = {"dish": "a <table>\n\n  soup", "count": 2}
PRETTY = json.dumps(ORDERED, indent=2)
CHOICES = {
    "none": ToolChoice(mode="none"),
    "auto": ToolChoice(),
    "one in auto": ToolChoice(parallel=False),
    "required": ToolChoice(mode="required"),
    "one required": ToolChoice(mode="required", parallel=False),
    "named": ToolChoice(mode="required", name="ping"),
}
FORMATS: dict[str, Constraint | None] = {
    "text": None,
    "json_object": JSONObject(),
    "json_schema": JSONSchema(ORDER),
}


class Cell(NamedTuple):
    """One way of asking."""

    choice: str
    strict: bool
    form: str
    thinking: bool | None


class Family:
    """A published tokenizer and template."""

    def __init__(self, folder: Path, name: str) -> None:
        self.codec = load(str(published_model_dir(folder / name, name))).text
        self.compiler = GrammarCompiler(self.codec)
        self.template = self.codec.template
        self.harmony = self.template.form.headed

    def cells(self) -> Iterator[Cell]:
        """All ways of asking."""
        switched = (True, False) if self.template.abilities.thinking_switch else (None,)
        yield from map(Cell._make, product(CHOICES, (False, True), FORMATS, switched))

    def ask(self, cell: Cell) -> tuple[Conversation, HeldTo]:
        """Compile what an answer is held to."""
        conversation = Conversation(
            messages=[Message(role="user", content="hello")],
            tools=[
                Tool(name="order", parameters=ORDER, strict=cell.strict),
                Tool(name="ping", parameters=NOTHING, strict=cell.strict),
            ],
            tool_choice=CHOICES[cell.choice],
            options={} if cell.thinking is None else {"enable_thinking": cell.thinking},
        )
        opened = self.template.opens_reasoning(self.template.render(conversation))
        assert not opened, "none of these templates opens thoughts"
        wanted = FORMATS[cell.form]
        held = conversation_grammar(
            self.compiler, self.template, conversation, wanted, "me", opened=opened
        )
        return conversation, held

    def thoughts(self, cell: Cell) -> list[str]:
        """Text that may stand before an answer."""
        if self.template.form.reasoning is None or cell.thinking is False:
            return [""]
        if self.harmony:
            return ["", f"{ANALYSIS}Hm.\n\n<table><|end|>{NEXT}"]
        return ["", "<think>\nHm.\n\n<table>\n</think>\n\n"]

    def call(self, name: str, arguments: Any) -> str:
        """A call as this model writes it."""
        body = json.dumps(arguments)
        if self.harmony:
            header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
            return f"{header}<|message|>{body}"
        return f'<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>'

    def content(self, text: str) -> str:
        """Content as this model writes it."""
        return f"{FINAL}{text}" if self.harmony else text

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Write a text in the model's own tokens, and end it."""
        matcher = grammar.matcher()
        tokens = self.codec.encode(text, special_tokens=False)
        if not self.codec.encodes_apart:  # the first token has a blank that the text has not
            tokens = self.codec.encode(f"\n{text}", special_tokens=False)
            tokens = tokens[tokens.index(self.codec.encode("\n", special_tokens=False)[-1]) + 1 :]
        for token in tokens:
            if not matcher.mask()[token // 32] >> token % 32 & 1:
                return False
            matcher.consume(token)
        if matcher.is_complete:
            return True
        mask = matcher.mask()
        return any(mask[end // 32] >> end % 32 & 1 for end in self.codec.eos_ids)


@pytest.fixture
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    """Load one; each takes seconds, and has one test."""
    return Family(tmp_path, request.param)


def expected(cell: Cell) -> dict[str, bool]:
    """Which answers a cell allows; those that are named in `answers`."""
    mode = CHOICES[cell.choice].mode
    held = cell.form != "text"
    may_call, must_call = mode != "none", mode == "required"
    named, one = cell.choice == "named", CHOICES[cell.choice].one_call
    calls_are_held = cell.strict or must_call
    return {
        "order": may_call and not named,
        "wrong order": may_call and not named and not calls_are_held,
        "ping": may_call,
        "two calls": may_call and not one,
        "text": not must_call and not held,
        "json": not must_call,
        "other json": not must_call and cell.form != "json_schema",
    }


def answers(family: Family) -> dict[str, tuple[str, list[tuple[Any, ...]]]]:
    """Answers, and what is read of them."""
    ordered: tuple[Any, ...] = ("call", "order", ORDERED)
    ping: tuple[Any, ...] = ("call", "ping", {})
    wrong = {"dish": "soup", "count": "x"}
    two = f"{family.call('order', ORDERED)}\n{family.call('ping', {})}"
    return {
        "order": (family.call("order", ORDERED), [ordered]),
        "wrong order": (family.call("order", wrong), [("call", "order", wrong)]),
        "ping": (family.call("ping", {}), [ping]),
        "two calls": (two, [ordered, ping]),
        "text": (family.content("Hello <b> there"), [("text", "Hello <b> there")]),
        "json": (family.content(PRETTY), [("text", PRETTY)]),
        "other json": (family.content('{"a": [1]}'), [("text", '{"a": [1]}')]),
    }


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_every_way_of_asking(family: Family) -> None:
    """Right answers can be written and are read, behind thoughts too; wrong ones cannot."""
    faults: list[tuple[Any, ...]] = []
    seen: dict[tuple[str, Grammar], Cell] = {}
    told = answers(family)
    if family.harmony:
        del told["two calls"]  # an answer has one
    for cell in family.cells():
        conversation, held = family.ask(cell)
        free = CHOICES[cell.choice].mode == "none" or (
            CHOICES[cell.choice].mode == "auto" and not cell.strict
        )
        assert (held.grammar is None) == (free and cell.form == "text"), cell
        if held.grammar is None:
            continue
        like = seen.setdefault((cell.choice, held.grammar), cell)
        if like is not cell:  # compiled for another cell, which asks for the same
            assert expected(like) == expected(cell), (like, cell)
            continue
        for thought, (name, (text, parts)) in product(family.thoughts(cell), told.items()):
            wanted = expected(cell)[name]
            if family.accepts(held.grammar, thought + text) != wanted:
                faults.append((cell, thought, name, wanted))
            elif wanted:
                parser = OutputParser(
                    family.template.form,
                    tools=conversation.tools if cell.choice != "none" else [],
                    tool_choice=conversation.tool_choice,
                    guaranteed=held.guaranteed,
                    constrained=held.constrained,
                )
                read = parts_of(events_of(parser, thought + text))
                if [part for part in read if part[0] != "thought"] != parts:
                    faults.append((cell, thought, name, read))
    assert faults == []
