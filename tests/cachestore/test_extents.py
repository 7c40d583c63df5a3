"""Which file has which tokens, and who refers to it."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from umbel.cachestore.node import Extent, FileUse, as_tokens
from umbel.cachestore.record import Record, RecordKind
from umbel.cachestore.trie import RadixTrie


def record(number: int, start: int, end: int, kind: RecordKind = RecordKind.SPAN) -> Record:
    own = as_tokens(range(start, end)).tobytes()
    return Record(
        id=number,
        kind=kind,
        tenant="tenant",
        start=start,
        end=end,
        prefix=b"",
        digest=b"",
        tokens=own,
        name=f"{number}",
        nbytes=100 + number,
        checksum=b"",
        used=number,
    )


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=60))
def test_files_are_counted(uses: list[tuple[int, bool]]) -> None:
    kinds = list(RecordKind)
    records = [record(number, 0, 5, kinds[number % 2]) for number in range(5)]
    files, held, ever = FileUse(), Counter[int](), set[int]()
    for which, hold in uses:
        if hold:
            files.hold([records[which]])
            held[which] += 1
            ever.add(which)
        elif held[which]:
            files.drop([records[which]])
            held[which] -= 1
        in_use = [number for number in range(5) if held[number]]
        assert files.counts == +held
        assert len(files.counts) == len(in_use)
        assert files.nbytes == sum(records[number].nbytes for number in in_use)
        assert sum(files.by_kind.values()) == files.nbytes
    unused = {record.id for record in files.unused()}
    assert unused == ever - set(+held)
    assert files.unused() == []


def stored(trie: RadixTrie) -> Counter[int]:
    """Count the files that the nodes of a trie refer to."""
    return Counter(extent.record.id for node in trie.nodes() for extent in node.extents)


@given(st.lists(st.integers(1, 19), min_size=1, max_size=8), st.integers(0, 19))
def test_uses_are_those_of_the_nodes(cuts: list[int], kept: int) -> None:
    """However an edge is cut, joined and cut again, each node counts once for each file."""
    trie = RadixTrie()
    leaf = trie.append(trie.root, as_tokens(range(20)), None)
    trie.persistence.add_extent(leaf, Extent(record(1, 0, 12), 0, 12))
    trie.persistence.add_extent(leaf, Extent(record(2, 12, 20), 12, 20))
    for offset in cuts:
        for node in list(trie.nodes()):
            if node.start < offset < node.end:
                trie.split(node, offset)
        assert stored(trie) == trie.persistence.files.counts
    while leaf.parent is not None and leaf.parent.parent is not None:
        trie.merge(leaf.parent)
        assert stored(trie) == trie.persistence.files.counts
    assert [extent.stop for extent in leaf.extents] == [12, 20]
    trie.persistence.drop_extents(leaf, kept)
    assert stored(trie) == trie.persistence.files.counts
    trie.persistence.drop_extents(leaf, 0)
    assert not trie.persistence.files.counts
    assert {gone.id for gone in trie.persistence.files.unused()} == {1, 2}
