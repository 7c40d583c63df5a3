"""Calls that must be made, of the embedded model, which repeats itself where it may not stop."""

import pytest

from ..dialects import Question, ask
from .running import RunningDaemon

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
REQUIRED = Question(
    "What is the weather like in Paris?", {"get_weather": CITY}, "required", max_tokens=300
)


@pytest.mark.parametrize(
    ("dialect", "stream"),
    [
        ("messages", True),
        pytest.param("chat", False, marks=pytest.mark.slow),
        pytest.param("responses", True, marks=pytest.mark.slow),
    ],
)
def test_a_repeated_call_ends_the_answer(
    smollm2_daemon: RunningDaemon, dialect: str, *, stream: bool
) -> None:
    """It has a call for each city at most, and is complete."""
    heard = ask(smollm2_daemon, dialect, REQUIRED, stream=stream)
    assert (heard.end, heard.text) == ("calls", "")
    assert 1 <= len(heard.calls) <= 2
    assert all(heard.calls.count(call) == 1 for call in heard.calls)
