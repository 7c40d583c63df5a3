"""Twenty turns of an agent that calls a tool in each: only what is new is computed."""

import json
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import pytest

from ..daemon.running import RunningDaemon
from .conftest import scripted
from .scripted import RESULT, plan

TURNS = 20
SHARE = 0.95
_SENT_BACK = ("role", "content", "tool_calls")
SYSTEM = "You are an agent that looks after a house. " * 12
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"look_{room}",
            "description": f"Tell what there is in the {room}, and how warm it is there.",
            "parameters": {
                "type": "object",
                "properties": {"corner": {"type": "string"}, "floor": {"type": "integer"}},
                "required": ["corner"],
            },
        },
    }
    for room in ("kitchen", "cellar", "attic", "garden", "garage", "hall")
]


class Turn(NamedTuple):
    """Tokens of one answer."""

    prompt: int
    cached: int
    answer: int


def call_in_its_own_way(number: int) -> str:
    """Write a call as no template would: other blanks, another order of escapes."""
    arguments = f'{{ "corner":"by the \\u0064oor {number}",  "floor":{number} }}'
    return f'<tool_call>\n{{"name":  "look_kitchen", "arguments": {arguments}}}\n</tool_call>'


class Agent:
    """Calls a tool in each turn until its plan is over.

    Args:
        daemon: which answers as the plan in the first message says.
        name: makes the first message this agent's own.
        thoughts: stand before each answer.
    """

    tools: ClassVar = TOOLS

    def __init__(self, daemon: RunningDaemon, name: str, thoughts: str = "") -> None:
        self._daemon = daemon
        ask = f"I am {name}. {plan(*self.steps(thoughts))}"
        system = {"role": "system", "content": SYSTEM}
        self.messages: list[dict[str, Any]] = [system, {"role": "user", "content": ask}]
        self.turns: list[Turn] = []

    def steps(self, thoughts: str) -> list[str]:
        """Say what it is answered, turn by turn; the last one goes on."""
        calls = [thoughts + call_in_its_own_way(number) for number in range(TURNS - 1)]
        return [*calls, f"{thoughts}It says: {RESULT}."]

    def run(self) -> None:
        """Work to the end of the plan."""
        for number in range(TURNS - 1):
            (call,) = self.ask()["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert arguments == {"corner": f"by the door {number}", "floor": number}
            self.messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": f"{number} chairs"}
            )
        assert self.ask()["content"] == f"It says: {TURNS - 2} chairs."

    def ask(self) -> dict[str, Any]:
        """Ask for the next answer, and send it back from then on as agents do."""
        reply = self._daemon.post(
            {"messages": self.messages, "tools": self.tools, "temperature": 0, "max_tokens": 200}
        ).json()
        usage = reply["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.turns.append(Turn(usage["prompt_tokens"], cached, usage["completion_tokens"]))
        message: dict[str, Any] = reply["choices"][0]["message"]
        sent = {key: value for key, value in message.items() if key in _SENT_BACK}
        for call in sent.get("tool_calls") or []:  # agents write them again, as short as they can
            compact = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
            call["function"]["arguments"] = compact
        self.messages.append(sent)
        return message


class TerseAgent(Agent):
    """One whose calls and prompts take few tokens: real weights take a while for each."""

    tools: ClassVar = [{"type": "function", "function": {"name": "look"}}]

    def steps(self, thoughts: str) -> list[str]:
        """Call the same tool again and again, with less around it than a template writes."""
        return [f'{thoughts}<tool_call>{{"name":"look"}}']

    def run(self) -> None:
        """Ask in each turn."""
        for number in range(TURNS):
            (call,) = self.ask()["tool_calls"]
            assert call["function"] == {"name": "look", "arguments": "{}"}
            self.messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": f"{number} chairs"}
            )


@pytest.fixture(scope="module")
def embedded_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A scripted daemon with the embedded model's own weights."""
    from umbel.models.load import embedded, embedded_file  # noqa: PLC0415  (it imports mlx.core)

    import mlx.core as mx  # noqa: PLC0415  # isort: skip  (after umbel.models)

    tokenizer = tmp_path_factory.mktemp("tokenizer")
    embedded.load(mx.float16).tokenizer.save_pretrained(tokenizer)
    with scripted(embedded_file.NAME, tokenizer) as daemon:
        yield daemon


def check(first: Agent, second: Agent) -> None:
    """See that nothing was computed twice, and how much of all was cached."""
    for agent in (first, second):
        for before, after in zip(agent.turns, agent.turns[1:], strict=False):
            # All that was there before the answer ended, and the answer.
            assert after.cached >= before.prompt + before.answer - 1
    assert len(second.turns) == TURNS
    prompts = sum(turn.prompt for turn in second.turns)
    assert sum(turn.cached for turn in second.turns) / prompts >= SHARE


def test_only_what_is_new_is_computed(scripted_daemon: RunningDaemon) -> None:
    """With SmolLM2's template, which knows no tools, beside an agent with the same system."""
    first, second = Agent(scripted_daemon, "one"), Agent(scripted_daemon, "another")
    first.run()
    second.run()
    check(first, second)


@pytest.mark.nightly
def test_only_what_is_new_is_computed_by_the_embedded_model(
    embedded_daemon: RunningDaemon,
) -> None:
    """With SmolLM2's own weights; another agent with the same system has asked once."""
    first, second = TerseAgent(embedded_daemon, "one"), TerseAgent(embedded_daemon, "another")
    first.ask()
    second.run()
    check(first, second)
    assert "history drift" not in embedded_daemon.log()


@pytest.mark.slow
def test_thoughts_stay_while_the_turn_goes_on(thinking_daemon: RunningDaemon) -> None:
    """With a template that writes calls and thoughts itself; agents do not send thoughts back."""
    thoughts = "I look at it.\n</think>\n\n"
    first = Agent(thinking_daemon, "one", thoughts)
    second = Agent(thinking_daemon, "another", thoughts)
    first.run()
    second.run()
    check(first, second)
    assert "history drift" not in thinking_daemon.log()
    # A new question ends the turn: the template drops its thoughts, and the log says so.
    before = second.turns[0].prompt
    second.messages.append({"role": "user", "content": "Thank you. And now?"})
    second.ask()
    assert second.turns[-1].cached >= before - 8  # all but the beginning of the first answer
    line = next(line for line in thinking_daemon.log().splitlines() if "history drift" in line)
    assert "drops earlier thoughts" in line
    assert " token=" in line
