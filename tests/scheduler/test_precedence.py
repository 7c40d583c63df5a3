"""Order of tenants' prompts: none waits for many of another's, and none for ever."""

import itertools
from collections import Counter
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from umbel.scheduler.policy import LAG, ChunkSize, PrefillShares, age, plan, precedence
from umbel.scheduler.sequence import Sequence

from ..fakes import make_request

LENGTHS = st.lists(st.integers(8, 300), min_size=1, max_size=8)


def prompt(tokens: int, tenant: str) -> Sequence:
    """A sequence that has so many tokens to prefill."""
    return Sequence(make_request("a", [7] * (tokens + 1), tenant=tenant))


class Prefills:
    """Computes prompts as the engine does, a chunk of one at each step.

    Attributes:
        computed: tokens of each tenant's prompts.
    """

    def __init__(self, chunk: int, weights: Mapping[str, float] | None = None) -> None:
        self.computed = Counter[str]()
        self._chunk = chunk
        self._weights = weights or {}
        self._shares = PrefillShares()

    def step(self, running: list[Sequence]) -> Sequence:
        """Compute the next chunk; returns whose."""
        tenants = {s.request.tenant for s in running if s.num_left_to_prefill}
        weights = {each: self._weights.get(each, 1) for each in tenants}
        order = self._shares.precedence(running, weights)
        chunk = plan(running, ChunkSize(self._chunk), order).prefill
        assert chunk is not None
        (chosen,), tokens = chunk.sequences, chunk.tokens
        age(running, chosen, tokens)
        self._shares.charge(chosen.request.tenant, tokens, weights)
        self.computed[chosen.request.tenant] += tokens
        chosen.num_computed_tokens += tokens
        return chosen

    def until_complete(self, running: list[Sequence], sequence: Sequence) -> int:
        """Complete a prompt; returns by how many tokens of other tenants' it was passed over."""
        before = self.computed.copy()
        while sequence.num_left_to_prefill:
            self.step(running)
        return (self.computed - before).total() - (self.computed - before)[sequence.request.tenant]


def test_fewer_slots_go_first() -> None:
    assert precedence(1, 1, 0) < precedence(7, 1, 0)
    assert precedence(2, 4, 0) < precedence(1, 1, LAG - 1)
    assert precedence(7, 1, LAG) < precedence(1, 8, 0)
    assert precedence(7, 1, LAG + 1) < precedence(1, 1, LAG)


def test_who_comes_does_not_wait_for_what_another_has_under_way() -> None:
    """However many and however short its prompts are, and though it was behind until now."""
    heavy = [prompt(8, "heavy") for _ in range(5)]
    prefills = Prefills(4)
    prefills.step(heavy)
    light = prompt(40, "light")
    assert prefills.until_complete([*heavy, light], light) == 0


@given(own=LENGTHS, others=LENGTHS, chunk=st.integers(8, 64))
def test_a_tenants_prompt_is_not_held_up_by_how_many_another_sends(
    own: list[int], others: list[int], chunk: int
) -> None:
    """One after another, each waits for its own length and two chunks at most; the first, not."""
    heavy = [prompt(length, "heavy") for length in (*others, 10_000)]
    prefills = Prefills(chunk)
    for number, length in enumerate(own):
        light = prompt(length, "light")
        passed = prefills.until_complete([*heavy, light], light)
        assert passed <= (length + 2 * chunk if number else 0)


@given(others=LENGTHS, chunk=st.integers(8, 64), slots=st.integers(1, 6), come_and_go=st.booleans())
def test_who_fills_the_batch_is_not_starved(
    others: list[int], chunk: int, slots: int, *, come_and_go: bool
) -> None:
    """By another's prompts that never end, nor by new tenants with one prompt each.

    At no time others had over twice the bound, and two chunks, beyond as much as it had.
    """
    heavy = [prompt(5000, "heavy") for _ in range(slots + 1)]
    arrivals = zip(itertools.count(), itertools.cycle(others), strict=False)
    prefills = Prefills(chunk)
    light = prompt(1, "first")
    while prefills.computed.total() < 4 * LAG:
        if not light.num_left_to_prefill:
            number, length = next(arrivals)
            light = prompt(length, f"light {number}" if come_and_go else "light")
        prefills.step([*heavy, light])
        had = prefills.computed["heavy"]
        assert prefills.computed.total() - 2 * had <= 2 * LAG + 2 * chunk


@given(
    weights=st.lists(st.sampled_from((0.5, 1, 2, 4)), min_size=2, max_size=5),
    slots=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    lengths=st.lists(st.integers(1, 900), min_size=5, max_size=5),
    chunk=st.sampled_from((16, 64, 512)),
)
def test_prompts_that_never_end_are_computed_by_weight(
    weights: list[float], slots: list[int], lengths: list[int], chunk: int
) -> None:
    """However many each tenant has and however long they are: none is behind by more than a bound.

    That is the one of its virtual time, and a chunk of the least weight.
    """
    by_tenant = {str(number): weight for number, weight in enumerate(weights)}
    running = [
        prompt(length, tenant)
        for tenant, many, length in zip(by_tenant, slots, lengths, strict=False)
        for _ in range(many)
    ]
    prefills = Prefills(chunk, by_tenant)
    for _ in range(150):
        done = prefills.step(running)
        if not done.num_left_to_prefill:
            running.remove(done)
            running.append(prompt(done.num_prompt_tokens - 1, done.request.tenant))
        part = prefills.computed.total() / sum(weights)
        for tenant, weight in by_tenant.items():
            behind = part - prefills.computed[tenant] / weight
            assert behind <= LAG + chunk / min(weights)


def test_tenants_with_as_many_slots_are_as_one() -> None:
    """The shortest of all goes first, and none is cut into for the other's sake."""
    first, second, third = (prompt(n, tenant) for n, tenant in ((90, "a"), (40, "b"), (90, "c")))
    prefills = Prefills(16)
    running = [first, second, third]
    assert [prefills.step(running) for _ in range(3)] == [second] * 3
    assert [prefills.step(running) for _ in range(6)] == [first] * 6


class TestOwed:
    """Tokens that tenants are owed."""

    @staticmethod
    def owed(shares: PrefillShares, **weights: float) -> dict[str, float]:
        """Say which tenants have prompts; returns what each is owed."""
        shares.precedence([], weights)
        return dict(shares._owed)

    def test_each_token_is_owed_by_weight(self) -> None:
        """And paid to the tenant that it was computed for."""
        made, weights = PrefillShares(), {"a": 1, "b": 3}
        made.charge("a", 80, weights)
        assert self.owed(made, a=1, b=3) == {"a": -60, "b": 60}
        made.charge("a", 20, weights)
        made.charge("b", 300, weights)
        assert self.owed(made, a=1, b=3) == {"a": 0, "b": 0}

    def test_time_without_prompts_earns_nothing(self) -> None:
        """A tenant that comes, or comes back, is owed nothing and owes nothing."""
        made = PrefillShares()
        made.charge("a", 100, {"a": 1})
        assert self.owed(made, a=1, b=1) == {"a": 0, "b": 0}
        made.charge("b", 100, {"a": 1, "b": 1})
        self.owed(made, a=1)
        assert self.owed(made, a=1, b=1) == {"a": 50, "b": 0}

    def test_a_tenant_alone_is_paid(self) -> None:
        """It is owed no more than nothing then."""
        made = PrefillShares()
        made.charge("b", 100, {"a": 1, "b": 1})
        self.owed(made, a=1)
        made.charge("a", 30, {"a": 1})
        assert self.owed(made, a=1) == {"a": 20}
        made.charge("a", 100, {"a": 1})
        assert self.owed(made, a=1) == {"a": 0}
