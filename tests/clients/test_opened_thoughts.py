"""Answers that are held to something, of a model whose prompt opens its thoughts."""

import json

import pytest

from ..daemon.running import RunningDaemon
from ..dialects import ROUTES, Heard, Question, ask
from .scripted import plan

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
PARIS = {"city": "Paris"}
CALL = f'<tool_call>\n{{"name": "look", "arguments": {json.dumps(PARIS)}}}\n</tool_call>'
HELD = {
    "content": ({"schema": CITY}, json.dumps(PARIS), Heard("Hm.", json.dumps(PARIS), [], "stop")),
    "required": (
        {"tools": {"look": CITY}, "choice": "required", "parallel": False},
        CALL,
        Heard("Hm.", "", [("look", PARIS)], "calls"),
    ),
    "strict": (
        {"tools": {"look": CITY}, "strict": True},
        CALL,
        Heard("Hm.", "", [("look", PARIS)], "calls"),
    ),
}


@pytest.mark.parametrize("dialect", ROUTES)
@pytest.mark.parametrize("name", HELD)
def test_thoughts_end(thinking_daemon: RunningDaemon, name: str, dialect: str) -> None:
    """With the token that ends them, and what is asked for follows."""
    fields, answer, wanted = HELD[name]
    asked = Question(plan(f"Hm.\n</think>\n\n{answer}"), **fields)  # type: ignore[arg-type]
    for stream in (False, True):
        assert ask(thinking_daemon, dialect, asked, stream=stream) == wanted
