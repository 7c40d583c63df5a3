"""A sequence preempted for want of memory goes on as if nothing had happened, token by token."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from umbel.models.params import SamplingParams
from umbel.scheduler.request import FinishReason
from umbel.scheduler.sequence import Sequence, SequenceStatus

from .. import zoo
from .memory_tools import CHUNK, GREEDY, SEEDED, Ask, ServerFixture, words, zoo_model

_QUICK = [("llama", False), ("llama", True), ("gemma3_text", False), ("deepseek_v3", False)]
EVERY = zoo.params(zoo.each((False, True)), _QUICK)

ASKS = (
    Ask(words(30, "a"), 40, SEEDED),
    Ask(words(30, "b"), 30, GREEDY),
    Ask(words(3 * CHUNK, "c"), 24, SEEDED),
)


@cache
def expected(name: str, *, exact: bool) -> list[list[int]]:
    """The answers where memory abounds."""
    return [
        told.tokens for told in ServerFixture(zoo_model(name), 1 << 30, exact=exact).serve(ASKS)
    ]


class Preempted:
    """Three requests, of which the younger ones are preempted when a test says so."""

    def __init__(self, name: str, *, exact: bool = False, disk: Path | None = None) -> None:
        self.server = ServerFixture(zoo_model(name), 1 << 26, exact=exact, disk=disk)
        self.names = [self.server.send(ask) for ask in ASKS]
        self.exact = exact

    @property
    def live(self) -> list[Sequence]:
        """The sequences, in order."""
        return [self.server.live[name] for name in self.names]

    def preempt(self) -> None:
        """Take away memory until one runs alone, and give it back."""
        self.server.squeeze()
        assert any(sequence.status is SequenceStatus.PREEMPTED for sequence in self.live)
        self.server.allow(self.server.budget)

    def decoding(self, tokens: int) -> None:
        """Go on until all have answered so much."""
        self.server.until(lambda: all(len(s.output) >= tokens for s in self.live))

    def check(self) -> None:
        """All are answered as where memory abounds, and nothing is left of them."""
        self.server.until(lambda: self.server.idle)
        told = [self.server.told[name] for name in self.names]
        assert [t.error for t in told] == [None] * len(told)
        assert [t.tokens for t in told] == expected(self.server.name, exact=self.exact)
        self.server.check_rest()


@pytest.mark.parametrize(("name", "exact"), EVERY)
def test_preempted_in_the_prompt_and_twice_in_the_answer(name: str, *, exact: bool) -> None:
    """Greedy and seeded answers are those of a run that was never preempted."""
    preempted = Preempted(name, exact=exact)
    preempted.server.until(lambda: 0 < preempted.live[2].num_computed_tokens < 2 * CHUNK)
    preempted.preempt()
    preempted.decoding(3)
    preempted.preempt()
    preempted.decoding(12)
    preempted.preempt()
    preempted.check()
    assert preempted.server.preemptions >= 4


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_preempted_with_a_token_on_its_way(name: str) -> None:
    """As on a GPU, where a step is launched before the last one is read."""
    preempted = Preempted(name)
    runner = preempted.server.assembly.runner
    runner.overlaps = True
    runner.rules = replace(runner.rules, overlaps=True)
    preempted.decoding(4)
    assert preempted.live[1].pending is not None
    preempted.preempt()
    preempted.decoding(9)
    preempted.preempt()
    preempted.check()


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_what_was_preempted_comes_back_from_disk(name: str, tmp_path: Path) -> None:
    """Where its state was left to the disk meanwhile, it is read from there."""
    preempted = Preempted(name, disk=tmp_path / "disk")
    preempted.decoding(4)
    preempted.server.save()  # in so little memory no request waits for the disk
    preempted.server.squeeze()
    preempted.server.save()
    preempted.server.assembly.cache.evict(0)
    preempted.server.allow(preempted.server.budget)
    preempted.check()
    assert preempted.server.engine.statistics().page_ins > 0
    preempted.server.close()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
def test_ended_while_preempted(how: str, *, exact: bool) -> None:
    """It ends at once, the others go on, and its conversation's next request runs."""
    server = ServerFixture(zoo_model("llama"), 1 << 26, exact=exact)
    server.engine._clock = lambda: clock[0]
    clock = [0.0]
    names = [server.send(ASKS[0]), server.send(Ask(*_of(ASKS[1]), tag="c", deadline=9.0))]
    after = server.send(Ask(*_of(ASKS[1]), tag="c"))
    server.until(lambda: all(len(server.live[n].output) >= 3 for n in names))
    server.squeeze()
    assert server.live[names[1]].status is SequenceStatus.PREEMPTED
    assert server.told[after].cached is None
    if how == "cancel":
        server.live[names[1]].cancelled = True
    else:
        clock[0] = 10.0
    server.allow(server.budget)
    server.step()
    reasons = {"cancel": FinishReason.CANCELLED, "deadline": FinishReason.ERROR}
    assert server.told[names[1]].reason is reasons[how]
    server.until(lambda: server.idle)
    assert server.told[names[0]].tokens == expected("llama", exact=exact)[0]
    assert server.told[after].tokens == expected("llama", exact=exact)[1]
    server.check_rest()


def test_turns_of_a_conversation_keep_their_order() -> None:
    """The next turn of a preempted one does not start before him, nor do later requests."""
    server = ServerFixture(zoo_model("llama"), 1 << 26)
    first, second = server.send(ASKS[0]), server.send(Ask(*_of(ASKS[1]), tag="c"))
    server.until(lambda: all(len(server.live[n].output) >= 3 for n in (first, second)))
    later = [server.send(Ask(*_of(ASKS[1]), tag="c")), server.send(ASKS[2])]
    server.squeeze()
    server.allow(server.budget)
    server.until(lambda: server.told[second].reason is not None)
    assert not server.told[later[0]].tokens
    server.until(lambda: server.idle)
    assert [server.told[n].error for n in later] == [None, None]
    assert (
        server.told[second].tokens
        == server.told[later[0]].tokens
        == expected("llama", exact=False)[1]
    )


@pytest.mark.slow
def test_growth_alone_preempts() -> None:
    """Answers that outgrow what there is room for preempt the youngest, and all are right."""
    asks = [Ask(words(12, i), 600, SEEDED) for i in range(4)]
    probe = ServerFixture(zoo_model("llama"), 1 << 30)
    answers = [told.tokens for told in probe.serve(asks)]
    need = probe.assembly.runner.profile
    server = ServerFixture(
        zoo_model("llama"), need.worst_case(612).nbytes + need.sizes.token * 1000
    )
    told = server.serve(asks)
    assert server.preemptions > 0
    assert [t.tokens for t in told] == answers
    server.check_rest()


def _of(ask: Ask) -> tuple[list[int], int, SamplingParams]:
    return ask.prompt, ask.tokens, ask.sampling
