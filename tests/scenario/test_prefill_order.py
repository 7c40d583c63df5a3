"""A short request that comes in the middle of a long prompt does not wait for it.

Steps are counted, and not seconds: each has at most one chunk of one prompt.
"""

import pytest

from umbel.cachestore.checkpoints import Reason

from .memory_tools import CHUNK, Ask, ServerFixture, words, zoo_model

LONG = 16 * CHUNK
BUDGET = 1 << 30
NAMES = ["llama", "gemma3_text", "mamba2", "qwen3_next"]


def steps_to_first_token(rig: ServerFixture, name: str) -> int:
    """Step until a request has a token; how many steps it took."""
    for count in range(1, 1000):
        rig.step()
        if rig.told[name].tokens:
            return count
    raise AssertionError("it never had one")


def begun(rig: ServerFixture, prompt: list[int], boundary: int = 0) -> str:
    """Begin a long prompt, and come some chunks far."""
    boundaries = [(boundary, Reason.SYSTEM)] if boundary else []
    name = rig.send(Ask(prompt, 4, boundaries=boundaries))
    for _ in range(5):
        rig.step()
    assert rig.live[name].num_computed_tokens >= 4 * CHUNK
    return name


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_short_prompt_passes_a_long_one(name: str, *, exact: bool) -> None:
    """Its first token comes after its own work and a step, and the long one waits for no more."""
    rig = ServerFixture(zoo_model(name), BUDGET, exact=exact)
    alone = ServerFixture(zoo_model(name), BUDGET, exact=exact)
    undisturbed = steps_to_first_token(alone, begun(alone, words(LONG, "long")))
    long = begun(rig, words(LONG, "long"))
    short = rig.send(Ask(words(11, "short"), 1))
    assert steps_to_first_token(rig, short) <= 3
    assert not rig.told[long].tokens
    assert steps_to_first_token(rig, long) <= undisturbed
    rig.until(lambda: rig.idle)
    alone.until(lambda: alone.idle)
    if exact:
        (told,) = alone.told.values()
        assert rig.told[long].tokens == told.tokens


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_they_share_is_shared_at_once(name: str, *, exact: bool) -> None:
    """With the same system prompt, it leases what is computed of it, and does not wait for all."""
    system = words(3 * CHUNK, "system")
    rig = ServerFixture(zoo_model(name), BUDGET, exact=exact)
    long = begun(rig, [*system, *words(LONG, "long")], len(system))
    short = rig.send(Ask([*system, *words(11, "short")], 1))
    assert steps_to_first_token(rig, short) <= 5
    assert not rig.told[long].tokens
    assert rig.told[short].cached == len(system)
    rig.until(lambda: rig.idle)
    assert rig.told[long].error is None
    rig.check_rest()


@pytest.mark.parametrize("exact", [False, True])
def test_each_waits_for_no_more_than_it_shares(*, exact: bool) -> None:
    """One that shares little does not wait for what another shares."""
    rig = ServerFixture(zoo_model("llama"), BUDGET, exact=exact)
    prompt = words(LONG, "long")
    begun(rig, prompt)
    near, far = (
        rig.send(Ask([*prompt[: chunks * CHUNK], *words(11, chunks)], 1)) for chunks in (6, 14)
    )
    assert steps_to_first_token(rig, near) <= 5
    assert not rig.told[far].tokens
    rig.until(lambda: rig.idle)
    assert [rig.told[name].error for name in (near, far)] == [None, None]
    rig.check_rest()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_whoever_waits_resumes_where_prompts_part(name: str, *, exact: bool) -> None:
    """Nobody said where that is: the checkpoint is taken because another waits."""
    rig = ServerFixture(zoo_model(name), BUDGET, exact=exact)
    prompt = words(LONG, "long")
    asks = [Ask([*prompt[: n * CHUNK], *words(11, n)], 3, at=2) for n in (6, 10)]
    told = rig.serve([Ask(prompt, 3), *asks])
    assert [t.cached for t in told] == [0, 6 * CHUNK, 10 * CHUNK]
    if exact:
        alone = ServerFixture(zoo_model(name), BUDGET, exact=True)
        assert [alone.serve([ask])[0].tokens for ask in asks] == [t.tokens for t in told[1:]]
    rig.check_rest()


@pytest.mark.parametrize("name", ["gemma3_text", "mamba2"])
def test_nobody_waits_for_what_cannot_be_shared(name: str) -> None:
    """A state that has gone beyond what they share cannot be resumed: each computes its own."""
    rig = ServerFixture(zoo_model(name), BUDGET)
    prompt = words(LONG, "long")
    long = begun(rig, prompt)
    short = rig.send(Ask([*prompt[: 2 * CHUNK], *words(11, "short")], 1))
    assert steps_to_first_token(rig, short) <= 4
    assert not rig.told[long].tokens
    rig.until(lambda: rig.idle)
    rig.check_rest()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("chunks", [2, 6])
def test_what_is_awaited_is_not_passed_over(chunks: int, *, exact: bool) -> None:
    """Whoever waits for a long prompt's beginning does not wait for shorter ones as well."""
    rig = ServerFixture(zoo_model("llama"), BUDGET, exact=exact)
    prompt = words(LONG, "long")
    begun(rig, prompt)
    other = rig.send(Ask(words(LONG // 2, "other"), 1))
    rig.step()
    assert rig.live[other].num_computed_tokens
    waits = rig.send(Ask([*prompt[: chunks * CHUNK], *words(11, "waits")], 1))
    assert steps_to_first_token(rig, waits) <= 5
    assert rig.told[waits].cached == chunks * CHUNK
    assert not rig.told[other].tokens
    rig.until(lambda: rig.idle)
    rig.check_rest()


def test_a_long_prompt_that_waited_for_another_is_passed_too() -> None:
    """Only what came later makes a prompt older: a short one waits for neither of two long ones."""
    rig = ServerFixture(zoo_model("llama"), BUDGET)
    first, second = (rig.send(Ask(words(LONG, name), 1)) for name in ("first", "second"))
    steps_to_first_token(rig, first)
    rig.until(lambda: rig.live[second].num_computed_tokens >= 2 * CHUNK)
    short = rig.send(Ask(words(11, "short"), 1))
    assert steps_to_first_token(rig, short) <= 3
    assert not rig.told[second].tokens
    rig.until(lambda: rig.idle)


def test_short_prompts_that_never_end_do_not_stop_a_long_one() -> None:
    """It is passed over for as many tokens as it has left, and then goes first."""
    rig = ServerFixture(zoo_model("llama"), BUDGET)
    long = begun(rig, words(LONG, "long"))
    came = 0
    while not rig.told[long].tokens:
        if len(rig.queue) + len(rig.engine.statistics().running) < 4:
            rig.send(Ask(words(CHUNK + 1, f"short {came}"), 1))
            came += 1
        rig.step()
        assert came < 3 * LONG // CHUNK
    assert came > LONG // CHUNK // 2
    rig.until(lambda: rig.idle)
    assert all(told.error is None for told in rig.told.values())
