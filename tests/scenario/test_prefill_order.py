"""A short request that comes in the middle of a long prompt does not wait for it.

Steps are counted, and not seconds: each has at most one call that computes prompts.
"""

import pytest

from umbel.cachestore.checkpoints import Reason

from .memory_tools import CHUNK, Ask, ServerFixture, words, zoo_model

LONG = 16 * CHUNK
BUDGET = 1 << 30
NAMES = ["llama", "gemma3_text", "mamba2", "qwen3_next"]


def steps_to_first_token(server: ServerFixture, name: str) -> int:
    """Step until a request has a token; how many steps it took."""
    for count in range(1, 1000):
        server.step()
        if server.told[name].tokens:
            return count
    raise AssertionError("it never had one")


def begun(server: ServerFixture, prompt: list[int], boundary: int = 0) -> str:
    """Begin a long prompt, and come some chunks far."""
    boundaries = [(boundary, Reason.SYSTEM)] if boundary else []
    name = server.send(Ask(prompt, 4, boundaries=boundaries))
    for _ in range(5):
        server.step()
    assert server.live[name].num_computed_tokens >= 4 * CHUNK
    return name


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_short_prompt_passes_a_long_one(name: str, *, exact: bool) -> None:
    """Its first token comes after its own work and a step, and the long one waits for no more."""
    server = ServerFixture(zoo_model(name), BUDGET, exact=exact)
    alone = ServerFixture(zoo_model(name), BUDGET, exact=exact)
    undisturbed = steps_to_first_token(alone, begun(alone, words(LONG, "long")))
    long = begun(server, words(LONG, "long"))
    short = server.send(Ask(words(11, "short"), 1))
    assert steps_to_first_token(server, short) <= 3
    assert not server.told[long].tokens
    assert steps_to_first_token(server, long) <= undisturbed
    server.until(lambda: server.idle)
    alone.until(lambda: alone.idle)
    if exact:
        (told,) = alone.told.values()
        assert server.told[long].tokens == told.tokens


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_they_share_is_shared_at_once(name: str, *, exact: bool) -> None:
    """With the same system prompt, it leases what is computed of it, and does not wait for all."""
    system = words(3 * CHUNK, "system")
    server = ServerFixture(zoo_model(name), BUDGET, exact=exact)
    long = begun(server, [*system, *words(LONG, "long")], len(system))
    short = server.send(Ask([*system, *words(11, "short")], 1))
    assert steps_to_first_token(server, short) <= 2
    assert not server.told[long].tokens
    assert server.told[short].cached == len(system)
    server.until(lambda: server.idle)
    assert server.told[long].error is None
    server.check_rest()


@pytest.mark.parametrize("exact", [False, True])
def test_each_waits_for_no_more_than_it_shares(*, exact: bool) -> None:
    """One that shares little does not wait for what another shares."""
    server = ServerFixture(zoo_model("llama"), BUDGET, exact=exact)
    prompt = words(LONG, "long")
    begun(server, prompt)
    near, far = (
        server.send(Ask([*prompt[: chunks * CHUNK], *words(11, chunks)], 1)) for chunks in (6, 14)
    )
    assert steps_to_first_token(server, near) <= 5
    assert not server.told[far].tokens
    server.until(lambda: server.idle)
    assert [server.told[name].error for name in (near, far)] == [None, None]
    server.check_rest()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_whoever_waits_resumes_where_prompts_part(name: str, *, exact: bool) -> None:
    """No client said where that is: the checkpoint is taken because another request waits."""
    server = ServerFixture(zoo_model(name), BUDGET, exact=exact)
    prompt = words(LONG, "long")
    asks = [Ask([*prompt[: n * CHUNK], *words(11, n)], 3, at=2) for n in (6, 10)]
    told = server.serve([Ask(prompt, 3), *asks])
    assert [t.cached for t in told] == [0, 6 * CHUNK, 10 * CHUNK]
    if exact:
        alone = ServerFixture(zoo_model(name), BUDGET, exact=True)
        assert [alone.serve([ask])[0].tokens for ask in asks] == [t.tokens for t in told[1:]]
    server.check_rest()


@pytest.mark.parametrize("name", ["gemma3_text", "mamba2"])
def test_nobody_waits_for_what_cannot_be_shared(name: str) -> None:
    """A state that has gone beyond what they share cannot be resumed: each computes its own."""
    server = ServerFixture(zoo_model(name), BUDGET)
    prompt = words(LONG, "long")
    long = begun(server, prompt)
    short = server.send(Ask([*prompt[: 2 * CHUNK], *words(11, "short")], 1))
    assert steps_to_first_token(server, short) <= 4
    assert not server.told[long].tokens
    server.until(lambda: server.idle)
    server.check_rest()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("chunks", [2, 6])
def test_what_is_awaited_is_not_passed_over(chunks: int, *, exact: bool) -> None:
    """A request that waits for a long prompt's beginning does not wait for shorter ones too."""
    server = ServerFixture(zoo_model("llama"), BUDGET, exact=exact)
    prompt = words(LONG, "long")
    begun(server, prompt)
    other = server.send(Ask(words(LONG // 2, "other"), 1))
    server.step()
    assert server.live[other].num_computed_tokens
    waits = server.send(Ask([*prompt[: chunks * CHUNK], *words(11, "waits")], 1))
    assert steps_to_first_token(server, waits) <= 5
    assert server.told[waits].cached == chunks * CHUNK
    assert not server.told[other].tokens
    server.until(lambda: server.idle)
    server.check_rest()


def test_a_long_prompt_that_waited_for_another_is_passed_too() -> None:
    """Only what came later makes a prompt older: a short one waits for neither of two long ones."""
    server = ServerFixture(zoo_model("llama"), BUDGET)
    first, second = (server.send(Ask(words(LONG, name), 1)) for name in ("first", "second"))
    steps_to_first_token(server, first)
    server.until(lambda: server.live[second].num_computed_tokens >= 2 * CHUNK)
    short = server.send(Ask(words(11, "short"), 1))
    assert steps_to_first_token(server, short) <= 3
    assert not server.told[second].tokens
    server.until(lambda: server.idle)


def test_short_prompts_that_never_end_do_not_stop_a_long_one() -> None:
    """It is passed over for as many tokens as it has left, and then goes first."""
    server = ServerFixture(zoo_model("llama"), BUDGET)
    long = begun(server, words(LONG, "long"))
    came = 0
    while not server.told[long].tokens:
        if len(server.queue) + len(server.engine.statistics().running) < 4:
            server.send(Ask(words(CHUNK + 1, f"short {came}"), 1))
            came += 1
        server.step()
        assert came < 3 * LONG // CHUNK
    assert came > LONG // CHUNK // 2
    server.until(lambda: server.idle)
    assert all(told.error is None for told in server.told.values())
