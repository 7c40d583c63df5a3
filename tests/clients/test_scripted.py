"""The script: what clients' tests rely on."""

import pytest

from ..daemon.running import RunningDaemon
from .outside import requests_in
from .scripted import RESULT, UNPLANNED, answer_to, call, plan

TURN = "<|im_start|>assistant\n"


def ask(daemon: RunningDaemon, *messages: tuple[str, str]) -> str:
    """Send a conversation and return the answer's text."""
    turns = [{"role": role, "content": text} for role, text in messages]
    answer = daemon.post({"model": "scripted", "messages": turns, "temperature": 1}).json()
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    return str(answer["choices"][0]["message"]["content"])


def test_the_daemon_follows_the_plan(scripted_daemon: RunningDaemon) -> None:
    """Each turn of a conversation is answered with its own step, character for character."""
    steps = ("Bonjour, 世界! 👩‍🚀\n", "Then this.")
    first = ask(scripted_daemon, ("user", plan(*steps)))
    assert first == steps[0]
    again = ("user", plan(*steps)), ("assistant", first), ("user", "go on")
    assert ask(scripted_daemon, *again) == steps[1]
    assert ask(scripted_daemon, ("user", "hello")) == UNPLANNED


def test_long_prompts(scripted_daemon: RunningDaemon) -> None:
    """A prompt as long as an agent's is computed, and cached for the next turn."""
    system = ("system", "You are an agent. " * 2000)
    asked = system, ("user", plan("one", "two"))
    assert ask(scripted_daemon, *asked) == "one"
    assert ask(scripted_daemon, *asked, ("assistant", "one"), ("user", "?")) == "two"
    last = requests_in(scripted_daemon.log())[-1]
    assert int(last["total"]) > 10_000
    assert int(last["left"]) < 20


@pytest.mark.parametrize("name", ["Write", "files.Write", "files__Write"])
def test_defined_tools_are_called(name: str) -> None:
    """A call has the name that the prompt defines, in a namespace or not."""
    answer = answer_to(f'[{{"name": "{name}"}}]' + plan(call("Write", path="a")) + TURN)
    assert answer == (
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"path": "a"}}}}\n</tool_call>'
    )


@pytest.mark.parametrize("name", ["Read", "OverWrite"])
def test_other_tools_are_not_called(name: str) -> None:
    """A call becomes text where the prompt does not define the tool."""
    answer = answer_to(f'[{{"name": "{name}"}}]' + plan(call("Write", path="a")) + TURN)
    assert answer == UNPLANNED


def test_the_last_plan_counts() -> None:
    """A later user's plan replaces an earlier one, and its steps begin at the first."""
    prompt = plan("a", "b") + TURN + "a" + plan("c", "d") + TURN
    assert answer_to(prompt) == "c"
    assert answer_to(prompt + "c" + TURN) == "d"
    assert answer_to(prompt + "c" + TURN + "d" + TURN) == "d"


def test_a_result_is_quoted() -> None:
    """A step quotes what the last tool returned, so that a test sees that it arrived."""
    asked = (
        "<tool_response>\nnever\n</tool_response>" + plan(call("look"), f"It is {RESULT}.") + TURN
    )
    returned = "<tool_response>\n21 degrees\n</tool_response>"
    assert answer_to(asked + "calls" + returned + TURN) == "It is 21 degrees."
    assert answer_to(asked + "calls" + TURN) == f"It is {RESULT}."
