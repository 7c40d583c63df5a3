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
EVERY = [
    pytest.param(name, exact, marks=[] if (name, exact) in _QUICK else pytest.mark.slow)
    for name, exact in zoo.each((False, True))
]

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
        self.rig = ServerFixture(zoo_model(name), 1 << 26, exact=exact, disk=disk)
        self.names = [self.rig.send(ask) for ask in ASKS]
        self.exact = exact

    @property
    def live(self) -> list[Sequence]:
        """The sequences, in order."""
        return [self.rig.live[name] for name in self.names]

    def preempt(self) -> None:
        """Take away memory until one runs alone, and give it back."""
        self.rig.squeeze()
        assert any(sequence.status is SequenceStatus.PREEMPTED for sequence in self.live)
        self.rig.allow(self.rig.budget)

    def decoding(self, tokens: int) -> None:
        """Go on until all have answered so much."""
        self.rig.until(lambda: all(len(s.output) >= tokens for s in self.live))

    def check(self) -> None:
        """All are answered as where memory abounds, and nothing is left of them."""
        self.rig.until(lambda: self.rig.idle)
        told = [self.rig.told[name] for name in self.names]
        assert [t.error for t in told] == [None] * len(told)
        assert [t.tokens for t in told] == expected(self.rig.name, exact=self.exact)
        self.rig.check_rest()


@pytest.mark.parametrize(("name", "exact"), EVERY)
def test_preempted_in_the_prompt_and_twice_in_the_answer(name: str, *, exact: bool) -> None:
    """Greedy and seeded answers are those of a run that was never preempted."""
    preempted = Preempted(name, exact=exact)
    preempted.rig.until(lambda: 0 < preempted.live[2].num_computed_tokens < 2 * CHUNK)
    preempted.preempt()
    preempted.decoding(3)
    preempted.preempt()
    preempted.decoding(12)
    preempted.preempt()
    preempted.check()
    assert preempted.rig.preemptions >= 4


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_preempted_with_a_token_on_its_way(name: str) -> None:
    """As on a GPU, where a step is launched before the last one is read."""
    preempted = Preempted(name)
    runner = preempted.rig.assembly.runner
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
    preempted.rig.save()  # squeezed as it is now, nobody waits for the disk
    preempted.rig.squeeze()
    preempted.rig.save()
    preempted.rig.assembly.cache.evictor.evict(0)
    preempted.rig.allow(preempted.rig.budget)
    preempted.check()
    assert preempted.rig.engine.statistics().page_ins > 0
    preempted.rig.close()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("exact", [False, True], ids=["", "exact"])
def test_ended_while_preempted(how: str, *, exact: bool) -> None:
    """It ends at once, the others go on, and its conversation's next request runs."""
    rig = ServerFixture(zoo_model("llama"), 1 << 26, exact=exact)
    rig.engine._clock = lambda: clock[0]
    clock = [0.0]
    names = [rig.send(ASKS[0]), rig.send(Ask(*_of(ASKS[1]), tag="c", deadline=9.0))]
    after = rig.send(Ask(*_of(ASKS[1]), tag="c"))
    rig.until(lambda: all(len(rig.live[n].output) >= 3 for n in names))
    rig.squeeze()
    assert rig.live[names[1]].status is SequenceStatus.PREEMPTED
    assert rig.told[after].cached is None
    if how == "cancel":
        rig.live[names[1]].cancelled = True
    else:
        clock[0] = 10.0
    rig.allow(rig.budget)
    rig.step()
    reasons = {"cancel": FinishReason.CANCELLED, "deadline": FinishReason.ERROR}
    assert rig.told[names[1]].reason is reasons[how]
    rig.until(lambda: rig.idle)
    assert rig.told[names[0]].tokens == expected("llama", exact=exact)[0]
    assert rig.told[after].tokens == expected("llama", exact=exact)[1]
    rig.check_rest()


def test_turns_of_a_conversation_keep_their_order() -> None:
    """The next turn of a preempted one does not start before him, nor do later requests."""
    rig = ServerFixture(zoo_model("llama"), 1 << 26)
    first, second = rig.send(ASKS[0]), rig.send(Ask(*_of(ASKS[1]), tag="c"))
    rig.until(lambda: all(len(rig.live[n].output) >= 3 for n in (first, second)))
    later = [rig.send(Ask(*_of(ASKS[1]), tag="c")), rig.send(ASKS[2])]
    rig.squeeze()
    rig.allow(rig.budget)
    rig.until(lambda: rig.told[second].reason is not None)
    assert not rig.told[later[0]].tokens
    rig.until(lambda: rig.idle)
    assert [rig.told[n].error for n in later] == [None, None]
    assert rig.told[second].tokens == rig.told[later[0]].tokens == expected("llama", exact=False)[1]


@pytest.mark.slow
def test_growth_alone_preempts() -> None:
    """Answers that outgrow what there is room for preempt the youngest, and all are right."""
    asks = [Ask(words(12, i), 600, SEEDED) for i in range(4)]
    probe = ServerFixture(zoo_model("llama"), 1 << 30)
    answers = [told.tokens for told in probe.serve(asks)]
    need = probe.assembly.runner.profile
    rig = ServerFixture(zoo_model("llama"), need.worst_case(612).nbytes + need.sizes.token * 1000)
    told = rig.serve(asks)
    assert rig.preemptions > 0
    assert [t.tokens for t in told] == answers
    rig.check_rest()


def _of(ask: Ask) -> tuple[list[int], int, SamplingParams]:
    return ask.prompt, ask.tokens, ask.sampling
