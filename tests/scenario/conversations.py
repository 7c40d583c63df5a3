"""The scenarios: what agents do to a cache, in tokens."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from umbel.cachestore.checkpoints import Reason

from .bench import Bench, Outcome, words

SYSTEM = 130
"""Length of the system prompt, in tokens."""


class Checked(NamedTuple):
    """One request of a scenario, to compare with a cold run.

    Attributes:
        at_least: tokens that a stack with checkpoints must have restored.
        matched: tokens that must have been recognised.
    """

    outcome: Outcome
    matched: int
    at_least: int


Scenario = Callable[[Bench], Iterator[Checked]]


def _prompt(*parts: tuple[str, int]) -> list[int]:
    return [token for name, count in parts for token in words(count, name)]


def _ask(bench: Bench, prompt: list[int], tokens: int = 8) -> Outcome:
    """Serve a prompt whose boundaries are the system prompt's end and its own."""
    return bench.run(prompt, tokens, [(SYSTEM, Reason.SYSTEM), (len(prompt), Reason.MESSAGE)])


def cold(bench: Bench) -> Iterator[Checked]:
    """A prompt that no request has sent before."""
    yield Checked(_ask(bench, _prompt(("system", SYSTEM), ("user", 200)), 24), 0, 0)


def exact_repeat(bench: Bench) -> Iterator[Checked]:
    """The same prompt again: one token is left to compute."""
    prompt = _prompt(("system", SYSTEM), ("user", 200))
    first = _ask(bench, prompt, 4)
    yield Checked(_ask(bench, prompt, 16), len(prompt), len(first.prompt) - 1)


def same_system_new_user(bench: Bench) -> Iterator[Checked]:
    """Another agent with the same system prompt resumes at its end."""
    _ask(bench, _prompt(("system", SYSTEM), ("user", 200)))
    other = _prompt(("system", SYSTEM), ("other", 220))
    yield Checked(_ask(bench, other, 16), SYSTEM, SYSTEM)


def edited_last_turn(bench: Bench) -> Iterator[Checked]:
    """A user rewrites the last message of a conversation."""
    first = _ask(bench, _prompt(("system", SYSTEM), ("user", 150)), 24)
    base = [*first.history]
    _ask(bench, [*base, *words(90, "draft")])
    yield Checked(_ask(bench, [*base, *words(80, "edited")], 16), len(base), len(first.prompt) - 1)


def regenerate(bench: Bench) -> Iterator[Checked]:
    """The same prompt twice more after an answer."""
    prompt = _prompt(("system", SYSTEM), ("user", 170))
    _ask(bench, prompt, 40)
    for _ in range(2):
        yield Checked(_ask(bench, prompt, 16), len(prompt), len(prompt) - 1)


def fork_in_an_answer(bench: Bench) -> Iterator[Checked]:
    """Two follow-ups that keep half of an answer each go their own way."""
    first = _ask(bench, _prompt(("system", SYSTEM), ("user", 150)), 40)
    for name in ("one", "two", "three"):
        prompt = [*first.history[:-20], *words(60, name)]
        reached = len(first.history) - 20
        # From the third visitor on the junction is there to resume at.
        at_least = reached if name == "three" else len(first.prompt) - 1
        yield Checked(_ask(bench, prompt, 12), reached, at_least)


def divergence_inside_an_edge(bench: Bench) -> Iterator[Checked]:
    """Prompts that part in the middle of what was one message; the third resumes there."""
    shared = _prompt(("system", SYSTEM), ("shared", 70))
    _ask(bench, [*shared, *words(150, "a")])
    yield Checked(_ask(bench, [*shared, *words(150, "b")], 12), len(shared), SYSTEM)
    yield Checked(_ask(bench, [*shared, *words(150, "c")], 12), len(shared), len(shared))


def cancelled_prefill(bench: Bench) -> Iterator[Checked]:
    """A prompt that was given up half way, and sent again."""
    prompt = _prompt(("system", SYSTEM), ("user", 400))
    given_up = bench.run(prompt, 8, [(SYSTEM, Reason.SYSTEM)], cancel_after=5)
    assert not given_up.tokens
    # Five steps: without checkpoints five chunks, with them one of the steps ends at SYSTEM.
    reached = 256 if bench.exact else 320
    yield Checked(_ask(bench, prompt, 16), reached, reached)


def long_generation(bench: Bench) -> Iterator[Checked]:
    """A follow-up that repeats a long answer exactly resumes at its end."""
    first = _ask(bench, _prompt(("system", SYSTEM), ("user", 150)), 150)
    known = len(first.history) - 1  # the last token was never fed
    follow_up = [*first.history, *words(40, "next")]
    yield Checked(first, 0, 0)
    yield Checked(_ask(bench, follow_up, 16), known, known)


def rewritten_answer(bench: Bench) -> Iterator[Checked]:
    """A follow-up whose client wrote the long answer differently in the middle."""
    first = _ask(bench, _prompt(("system", SYSTEM), ("user", 150)), 150)
    kept = len(first.prompt) + 70
    follow_up = [*first.history[:kept], *words(60, "drift")]
    yield Checked(_ask(bench, follow_up, 16), kept, len(first.prompt) - 1 + 64)


def tool_turns(bench: Bench) -> Iterator[Checked]:
    """An agent's loop: short answers, then results of tools, each turn on top of the last."""
    history = _prompt(("system", SYSTEM), ("task", 90))
    reached = 0
    for turn in range(5):
        outcome = _ask(bench, history, 14)
        yield Checked(outcome, reached, max(0, reached - 14))
        reached = len(outcome.history) - 1
        history = [*outcome.history, *words(35, f"tool {turn}")]


SCENARIOS: tuple[Scenario, ...] = (
    cold,
    exact_repeat,
    same_system_new_user,
    edited_last_turn,
    regenerate,
    fork_in_an_answer,
    divergence_inside_an_edge,
    cancelled_prefill,
    long_generation,
    rewritten_answer,
    tool_turns,
)
