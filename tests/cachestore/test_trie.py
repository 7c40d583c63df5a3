"""The radix trie: match, append, split, merge, shorten, prune."""

import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.cachestore.node import TrieNode, as_tokens, common_length
from umbel.cachestore.trie import RadixTrie

from .fakes import FakeCheckpoint, FakeSpan, Registry


class TrieFixture:
    def __init__(self) -> None:
        self.registry = Registry()
        self.trie = RadixTrie()

    def append(self, parent: TrieNode, tokens: Sequence[int]) -> TrieNode:
        return self.trie.append(parent, as_tokens(tokens), FakeSpan(self.registry, tokens))

    def insert(self, tokens: Sequence[int]) -> TrieNode:
        """Add a whole sequence: follow it, split where it leaves, append the rest."""
        node, known = self.trie.match(as_tokens(tokens))
        if known < node.end:
            node = self.trie.split(node, known)
        return node if known == len(tokens) else self.append(node, tokens[known:])

    def match(self, tokens: Iterable[int]) -> tuple[TrieNode, int]:
        return self.trie.match(as_tokens(list(tokens)))

    def sequences(self) -> set[tuple[int, ...]]:
        leaves = [node for node in self.trie.nodes() if not node.children]
        return {tuple(t for node in leaf.path() for t in read(node)) for leaf in leaves}

    def check(self) -> None:
        for node in self.trie.nodes():
            assert read(node) == tuple(node.tokens.tolist())
            assert node.parent is not None
            assert node.start == node.parent.end
            assert node.parent.children[int(node.tokens[0])] is node
        assert self.trie.spans.size.nbytes == sum(span.nbytes for span in self.registry.spans)
        held = sum(checkpoint.nbytes for checkpoint in self.registry.checkpoints)
        assert self.trie.checkpoints.size.nbytes == held


def read(node: TrieNode) -> tuple[int, ...]:
    assert isinstance(node.span, FakeSpan)
    return node.span.tokens


@pytest.fixture
def fixture() -> TrieFixture:
    return TrieFixture()


def test_match_follows_the_one_branch_as_far_as_it_goes(fixture: TrieFixture) -> None:
    assert fixture.match([1, 2]) == fixture.match([]) == (fixture.trie.root, 0)
    stem = fixture.append(fixture.trie.root, [1, 2])
    left, right = fixture.append(stem, [3, 4, 5]), fixture.append(stem, [5, 6])
    expected = {
        (1, 2, 3, 4, 5): (left, 5),
        (1, 2, 5, 6, 7): (right, 4),
        (1, 2, 3, 4, 9): (left, 4),  # a full edge, and a part of the next
        (1, 2, 3): (left, 3),
        (1, 2, 9): (stem, 2),
        (1, 9): (stem, 1),
        (9,): (fixture.trie.root, 0),
    }
    assert {prompt: fixture.match(list(prompt)) for prompt in expected} == expected


def test_append_refuses_a_sibling_with_the_same_first_token(fixture: TrieFixture) -> None:
    fixture.append(fixture.trie.root, [1, 2])
    for tokens in ([1, 3], []):
        with pytest.raises(ValueError, match="differ from its siblings"):
            fixture.trie.append(fixture.trie.root, as_tokens(tokens), None)
    fixture.check()


def test_split_divides_the_state_and_keeps_the_lower_object(fixture: TrieFixture) -> None:
    """Leases that end in a node stay valid: the lower part is that node, the upper is new."""
    node = fixture.append(fixture.trie.root, [1, 2, 3, 4])
    below = fixture.append(node, [5])
    checkpoint = FakeCheckpoint(fixture.registry, [1, 2, 3, 4])
    fixture.trie.set_checkpoint(node, checkpoint)
    node.ref_count, node.last_used, node.checkpoint_used = 2, 7, 8
    upper = fixture.trie.split(node, 1)
    assert (read(upper), read(node), read(below)) == ((1,), (2, 3, 4), (5,))
    assert (upper.start, upper.end, node.start, node.end) == (0, 1, 1, 4)
    assert node.path() == [upper, node]
    assert (upper.checkpoint, node.checkpoint) == (None, checkpoint)
    assert (upper.ref_count, node.ref_count, upper.last_used) == (2, 2, 7)
    fixture.check()


@pytest.mark.parametrize("offset", [-1, 0, 2, 5, 6])
def test_split_refuses_an_offset_that_is_not_inside_the_edge(
    fixture: TrieFixture, offset: int
) -> None:
    stem = fixture.append(fixture.trie.root, [1, 2])
    node = fixture.append(stem, [3, 4, 5])
    with pytest.raises(ValueError, match="not inside"):
        fixture.trie.split(node, offset)
    with pytest.raises(ValueError, match="not inside"):
        fixture.trie.split(fixture.trie.root, 0)
    assert read(node) == (3, 4, 5)
    fixture.check()


def test_merge_joins_tokens_state_and_recency(fixture: TrieFixture) -> None:
    upper = fixture.append(fixture.trie.root, [1, 2])
    lower = fixture.append(upper, [3])
    below = fixture.append(lower, [4])
    upper.last_used, lower.last_used = 9, 3
    assert fixture.trie.merge(upper) is lower
    assert (read(lower), lower.start, lower.end, lower.last_used) == ((1, 2, 3), 0, 3, 9)
    assert below.path() == [lower, below]
    fixture.check()


def test_merge_refuses_to_lose_a_place_or_a_branch(fixture: TrieFixture) -> None:
    """The root, a junction, a retained node and a checkpoint's node are never merged away."""
    upper = fixture.append(fixture.trie.root, [1])
    lower = fixture.append(upper, [2])
    with pytest.raises(ValueError, match="root"):
        fixture.trie.merge(fixture.trie.root)
    with pytest.raises(ValueError, match="unpack"):
        fixture.trie.merge(lower)
    for held in (upper, lower):
        held.ref_count = 1
        with pytest.raises(ValueError, match="retained"):
            fixture.trie.merge(upper)
        held.ref_count = 0
    fixture.trie.set_checkpoint(upper, FakeCheckpoint(fixture.registry, [1]))
    with pytest.raises(ValueError, match="checkpoint"):
        fixture.trie.merge(upper)
    fixture.trie.drop_checkpoint(upper)
    fixture.append(upper, [3])
    with pytest.raises(ValueError, match="unpack"):
        fixture.trie.merge(upper)
    fixture.check()


@given(st.integers(2, 40), st.data())
def test_split_then_merge_is_as_before(length: int, data: st.DataObject) -> None:
    fixture = TrieFixture()
    node = fixture.append(fixture.trie.root, range(length))
    checkpoint = FakeCheckpoint(fixture.registry, range(length))
    fixture.trie.set_checkpoint(node, checkpoint)
    before = fixture.trie.spans.size.nbytes
    upper = fixture.trie.split(node, data.draw(st.integers(1, length - 1)))
    assert fixture.trie.merge(upper) is node
    assert read(node) == tuple(range(length))
    assert (node.start, node.end, node.checkpoint) == (0, length, checkpoint)
    assert fixture.trie.spans.size.nbytes == before
    assert list(fixture.trie.nodes()) == [node]
    fixture.check()


def test_shorten_forgets_the_deep_end_and_its_checkpoint(fixture: TrieFixture) -> None:
    leaf = fixture.append(fixture.trie.root, [1, 2, 3, 4])
    fixture.trie.set_checkpoint(leaf, FakeCheckpoint(fixture.registry, [1, 2, 3, 4]))
    fixture.trie.shorten(leaf, 3)
    assert (read(leaf), leaf.end, leaf.checkpoint) == ((1, 2, 3), 3, None)
    assert fixture.match([1, 2, 3, 4]) == (leaf, 3)
    assert not fixture.registry.checkpoints
    fixture.check()


def test_shorten_to_its_start_removes_a_leaf(fixture: TrieFixture) -> None:
    stem = fixture.append(fixture.trie.root, [1, 2])
    leaf = fixture.append(stem, [3])
    fixture.trie.shorten(leaf, 2)
    assert list(fixture.trie.nodes()) == [stem]
    assert fixture.match([1, 2, 3]) == (stem, 2)
    fixture.check()


def test_shorten_refuses_the_root_inner_and_retained_nodes(fixture: TrieFixture) -> None:
    """Descendants of a shortened node would hang in the air, and a lease lose its state."""
    stem = fixture.append(fixture.trie.root, [1, 2])
    leaf = fixture.append(stem, [3, 4])
    with pytest.raises(ValueError, match="root"):
        fixture.trie.shorten(fixture.trie.root, 0)
    for node, end in ((stem, 1), (leaf, 1), (leaf, 4)):
        with pytest.raises(ValueError, match="leaf"):
            fixture.trie.shorten(node, end)
    leaf.ref_count = 1
    with pytest.raises(ValueError, match="leaf"):
        fixture.trie.shorten(leaf, 3)
    fixture.check()


def test_retaining_holds_the_whole_path_and_releasing_gives_it_back() -> None:
    """A node, what is above it and the root are held as often as it was asked for; siblings not."""
    trie = RadixTrie()
    stem = trie.append(trie.root, as_tokens([1, 2]), None)
    left, right = trie.append(stem, as_tokens([3]), None), trie.append(stem, as_tokens([4]), None)
    trie.retain(left)
    trie.retain(left)
    trie.retain(stem)
    counts = [node.ref_count for node in (trie.root, stem, left, right)]
    assert counts == [3, 3, 2, 0]
    with pytest.raises(ValueError, match="without leases"):
        trie.shorten(left, 2)
    upper = trie.split(stem, 1)
    trie.release(left)
    assert [node.ref_count for node in (trie.root, upper, stem, left)] == [2, 2, 2, 1]
    trie.release(left)
    trie.release(stem)
    assert not any(node.ref_count for node in (trie.root, *trie.nodes()))


def test_prune_stops_at_state_leases_and_branches() -> None:
    """Tokens without state lead nowhere; a checkpoint, a lease or a branch keeps what is above."""
    registry, trie = Registry(), RadixTrie()
    held = trie.append(trie.root, as_tokens([1]), None)
    empty = trie.append(held, as_tokens([2]), None)
    leaf = trie.append(empty, as_tokens([3]), None)
    trie.set_checkpoint(held, FakeCheckpoint(registry, [1]))
    empty.ref_count = leaf.ref_count = 1
    assert trie.prune(leaf) is leaf
    leaf.ref_count = 0
    assert trie.prune(leaf) is empty
    empty.ref_count = 0
    assert trie.prune(empty) is held
    trie.drop_checkpoint(held)
    assert trie.prune(held) is trie.root
    assert list(trie.nodes()) == []


def test_a_checkpoint_that_is_there_stays() -> None:
    fixture = TrieFixture()
    node = fixture.append(fixture.trie.root, [1, 2])
    first = FakeCheckpoint(fixture.registry, [1, 2])
    fixture.trie.set_checkpoint(node, first)
    fixture.trie.set_checkpoint(node, FakeCheckpoint(fixture.registry, [1, 2]))
    assert node.checkpoint is first
    assert fixture.registry.checkpoints == {first}
    fixture.check()


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12))
def test_match_is_longest_common_prefix_of_inserted(sequences: list[list[int]]) -> None:
    """Against a list of sequences: the match is the longest beginning that any of them has."""
    fixture = TrieFixture()
    for sequence in sequences:
        fixture.insert(sequence)
        fixture.check()
    rng = random.Random(0)  # noqa: S311  (nothing secret)
    for _ in range(20):
        prompt = as_tokens([rng.randrange(3) for _ in range(rng.randrange(9))])
        longest = max((common_length(as_tokens(s), prompt) for s in sequences), default=0)
        assert fixture.match(prompt)[1] == longest


@given(st.lists(st.integers(-2, 2)), st.lists(st.integers(-2, 2)))
def test_common_length_is_the_plain_definition(a: list[int], b: list[int]) -> None:
    """The vectorised comparison agrees with a loop, also for empty and negative tokens."""
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_length(as_tokens(a), as_tokens(b)) == expected


def test_nodes_own_their_tokens(fixture: TrieFixture) -> None:
    """No edge keeps a longer array alive: a prompt of megabytes ends with its request."""
    fixture.insert([1, 2, 3, 4])
    fixture.insert([1, 2, 9])
    leaf, _ = fixture.match([1, 2, 3, 4])
    fixture.trie.shorten(leaf, 3)
    assert all(node.tokens.base is None for node in fixture.trie.nodes())
    prompt = np.arange(3, dtype=np.int64)
    assert as_tokens(prompt).dtype == np.int32
