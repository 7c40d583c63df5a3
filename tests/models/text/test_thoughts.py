"""Thoughts between marks that mlx-lm does not list are thoughts."""

from pathlib import Path

import pytest

from umbel.models.text.formats import ReasoningFormat
from umbel.models.text.output import OutputParser

from ...tiny import CHAT_TEMPLATE
from .outputs import parts_of
from .templates import model_with


@pytest.mark.parametrize(
    ("start", "end", "special"),
    [
        ("[THINK]", "[/THINK]", True),
        ("<seed:think>", "</seed:think>", False),
        ("<thinking>", "</thinking>", True),
    ],
)
def test_marks_that_come_in_pairs(tmp_path: Path, start: str, end: str, special: bool) -> None:  # noqa: FBT001
    codec = model_with(tmp_path, CHAT_TEMPLATE, (start, end), special=special).text
    assert codec.template.form.reasoning == ReasoningFormat(start, end)
    detokenizer = codec.detokenizer(codec.markup_tokens)
    parser = OutputParser(codec.template.form)
    tokens = codec.encode(f"{start} the agent {end} reads", special_tokens=False)
    events = [event for token in tokens for event in parser.push(detokenizer.push(token))]
    assert parts_of(events + parser.flush()) == [("thought", "the agent"), ("text", "reads")]


def test_marks_of_the_template_alone(tmp_path: Path) -> None:
    cut = "{# <mind:think> … </mind:think> #}" + CHAT_TEMPLATE
    form = model_with(tmp_path / "a", cut).text.template.form
    assert form.reasoning == ReasoningFormat("<mind:think>", "</mind:think>")


def test_one_mark_alone_is_none(tmp_path: Path) -> None:
    form = model_with(tmp_path, CHAT_TEMPLATE, ("[THINK]",), special=True).text.template.form
    assert form.reasoning is None
