"""The ledger's sums, whatever is entered in whichever order."""

import hypothesis.strategies as st
from hypothesis import given

from umbel.cachestore.ledger import NOTHING, Kind, Ledger, Size

SIZES = st.builds(Size, st.integers(-1000, 1000), st.integers(-9, 9))
ENTRIES = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["add", "set", "close"]), SIZES), max_size=60
)


@given(st.lists(st.sampled_from(list(Kind)), min_size=5, max_size=5), ENTRIES)
def test_all_sums_agree(kinds: list[Kind], entries: list[tuple[int, str, Size]]) -> None:
    ledger = Ledger()
    accounts = [ledger.account(kind) for kind in kinds]
    for which, how, size in entries:
        account, before = accounts[which], accounts[which].size
        if how == "close":
            account.close()
            assert account.size == NOTHING
        elif how == "set":
            account.set(size)
            assert account.size == size
        else:
            account.add(size)
            assert account.size == before + size
        assert ledger.total == sum((a.size for a in accounts), NOTHING)
        assert ledger.total == sum(ledger.by_kind().values(), NOTHING)
        for kind in Kind:
            own = (a.size for a, its in zip(accounts, kinds, strict=True) if its is kind)
            assert ledger.held(kind) == sum(own, NOTHING)
    for account in accounts:
        account.close()
        account.close()
    assert ledger.total == NOTHING


def test_within_looks_at_both() -> None:
    limit = Size(10, 2)
    assert Size(10, 2).within(limit)
    assert not Size(11, 0).within(limit)
    assert not Size(0, 3).within(limit)
    assert Size(-5, -1).within(limit)
