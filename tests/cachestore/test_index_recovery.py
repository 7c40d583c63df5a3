"""After a restart the tries are as the disk knew them."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from umbel.cachestore import check
from umbel.cachestore.node import Tokens, as_tokens, path_tokens
from umbel.cachestore.paging.pager import recover_index
from umbel.cachestore.prefix_cache import PrefixCache
from umbel.cachestore.record import Record, RecordKind, digest, record_digest
from umbel.cachestore.state import Layout
from umbel.cachestore.tries import Namespace

from .disk_tools import FINGERPRINT
from .fakes import EVERYTHING, KV, NAMESPACE, PLENTY, RECURRENT, Stack
from .pager_tools import PagedWorld, damage, has_on_disk, on_disk

OTHER = Namespace("other")


def span(number: int, tokens: Tokens, start: int, /, **changes: str | bytes) -> Record:
    """Describe the file of the tokens of a path from an offset on."""
    made = Record(
        id=number,
        kind=RecordKind.SPAN,
        tenant=NAMESPACE.tenant,
        start=start,
        end=len(tokens),
        prefix=digest(tokens[:start]),
        digest=b"",
        tokens=tokens[start:].tobytes(),
        name=f"{number}",
        nbytes=4 * (len(tokens) - start),
        checksum=b"",
        used=number,
    )
    return sealed(replace(made, **changes), tokens[:start])  # type: ignore[arg-type]


def sealed(record: Record, before: Tokens) -> Record:
    """Give a record the digest of what it says of itself, after some tokens."""
    path = digest(np.frombuffer(before.tobytes() + record.tokens, np.uint8))
    kind, start, end = record.kind.value, record.start, record.end
    made = record_digest(FINGERPRINT, record.tenant, kind, start, end, path)
    return replace(record, digest=made)


def whole(number: int, tokens: Tokens, *, spans: bool) -> Record:
    """Describe the file of the whole state at a path's end."""
    start = len(tokens) if spans else 0
    made = replace(span(number, tokens, start), kind=RecordKind.CHECKPOINT)
    return sealed(made, tokens[:start])


def recovered(*records: Record, stack: Stack = KV, longest: int = 1 << 62) -> PrefixCache:
    cache = PrefixCache(stack.layout, budget=PLENTY, longest=longest)
    ascending = sorted(records, key=lambda record: record.start)
    assert recover_index(cache, ascending, FINGERPRINT) == []
    assert check.problems(cache) == []
    return cache


def extents(cache: PrefixCache) -> list[tuple[int, int, int]]:
    return sorted(
        (extent.start, extent.stop, extent.record.id)
        for trie in cache.tries
        for node in trie.nodes()
        for extent in node.extents
    )


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.booleans()),
    min_size=1,
    max_size=8,
)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(prompts=PROMPTS, longest=st.sampled_from([3, 7, 1 << 60]))
def test_recovered_index_equals_the_cache_before(
    stack: Stack, folder: Path, prompts: list[tuple[list[int], bool]], longest: int
) -> None:
    """Paths, offsets and files are the same, of both tenants, and nothing is collected."""
    with PagedWorld(stack, folder / uuid4().hex, longest=longest, interval=8) as world:
        served = [([*p, 9], OTHER if other else NAMESPACE) for p, other in prompts]
        for prompt, namespace in served:
            world.serve(prompt[:-1], namespace=namespace)
        world.write_all()
        before = on_disk(world.cache)
        tokens = world.cache.tries.statistics().stored_tokens
        world.page_out()  # in memory, a later checkpoint may rewind; from disk none is read
        expected = []
        for prompt, namespace in served:
            world.fetch(prompt, namespace)
            expected.append(world.probe(prompt, namespace))
        world.restart()
        assert all(has_on_disk(world.cache, path) for path in before)
        assert world.cache.tries.statistics().stored_tokens == tokens
        for (prompt, namespace), known in zip(served, expected, strict=True):
            assert world.fetch(prompt, namespace) <= 1
            assert world.probe(prompt, namespace) == known
        world.finish()


def test_recency_is_that_of_the_last_use(folder: Path) -> None:
    world = PagedWorld(EVERYTHING, folder)
    for number in range(3):
        world.serve(range(100 * number, 100 * number + 30))
        world.write_all()
    world.serve(range(30))
    world.write_all()
    order = _by_recency(world)
    assert order[-1] == 0
    world.restart()
    assert _by_recency(world) == order
    latest = max(node.last_used for node in world.trie.nodes())
    world.fetch(range(30))
    world.serve(range(30))
    assert max(node.last_used for node in world.trie.nodes()) > latest, "ticks count on"
    world.finish()


def _by_recency(world: PagedWorld) -> list[int]:
    """List the first tokens of the paths, those that were used longest ago first."""
    nodes = sorted(world.trie.nodes(), key=lambda node: (node.last_used, node.end))
    return [int(path_tokens(node)[0]) for node in nodes if not node.children]


def test_orphans_are_collected(folder: Path) -> None:
    world = PagedWorld(KV, folder)
    world.serve(range(50))
    world.write_all()
    world.serve([*range(50), *range(100, 150)])
    world.write_all()
    world.serve([*range(20), *range(200, 250)])
    world.write_all()
    first = next(record for record in world.tier.alive.values() if record.start == 0)
    damage(world.tier.path(first), "remove")
    world.restart()
    assert len(world.cache.tries) == 0
    world.step()
    world.step()
    assert world.tier.files() == set()
    assert world.tier.statistics().records == 0
    world.finish()


def test_tenants_do_not_mix() -> None:
    path = as_tokens(range(30))
    cache = PrefixCache(KV.layout, budget=PLENTY)
    records = [span(1, path[:10], 0), span(2, path, 10, tenant="other")]
    assert [orphan.id for orphan in recover_index(cache, records, FINGERPRINT)] == [2]
    assert [namespace.tenant for namespace, _ in cache.tries.items()] == [NAMESPACE.tenant]
    mixed = [span(3, path[:10], 0, tenant="other"), *records]
    cache = PrefixCache(KV.layout, budget=PLENTY)
    assert recover_index(cache, mixed, FINGERPRINT) == []
    sizes = {n.tenant: max(node.end for node in t.nodes()) for n, t in cache.tries.items()}
    assert sizes == {"tenant": 10, "other": 30}


def test_the_tokens_before_decide_where_a_record_belongs() -> None:
    one, other = as_tokens([*range(10), 7, 8]), as_tokens([*range(50, 60), 7, 8])
    cache = recovered(span(1, one[:10], 0), span(2, other[:10], 0), span(3, one, 10))
    trie = cache.tries.get(NAMESPACE)
    assert trie is not None
    assert trie.match(one).length == 12
    assert trie.match(other).length == 10


def test_duplicates_are_collected() -> None:
    """Of two files with the same tokens one is enough; more of the same is used in part."""
    path = as_tokens(range(30))
    cache = PrefixCache(KV.layout, budget=PLENTY)
    records = [
        span(1, path[:20], 0),
        span(2, path[:20], 0),
        span(3, path[:15], 5),
        span(4, path, 15),
    ]
    assert [orphan.id for orphan in recover_index(cache, records, FINGERPRINT)] == [2, 3]
    assert extents(cache) == [(0, 20, 1), (20, 30, 4)]
    assert cache.tries.files.counts == {1: 1, 4: 1}


def test_long_records_become_short_nodes() -> None:
    path = as_tokens(range(30))
    cache = recovered(span(1, path[:25], 0), span(2, path, 25), longest=10)
    assert extents(cache) == [(0, 10, 1), (10, 20, 1), (20, 25, 1), (25, 30, 2)]
    assert cache.tries.files.counts == {1: 3, 2: 1}
    assert cache.tries.files.nbytes == 120


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_whole_states_of_stacks_without_spans(order: tuple[int, ...]) -> None:
    path = as_tokens(range(30))
    fork = as_tokens([*range(10), *range(90, 99)])
    records = [whole(1, path, spans=False), whole(2, path[:12], spans=False)]
    records.append(whole(3, fork, spans=False))
    cache = recovered(*(records[number] for number in order), stack=RECURRENT)
    trie = cache.tries.get(NAMESPACE)
    assert trie is not None
    ends = {n.end: n.persisted_checkpoint.id for n in trie.nodes() if n.persisted_checkpoint}
    assert ends == {30: 1, 12: 2, 19: 3}
    assert path_tokens(trie.match(fork).node).tolist() == fork.tolist()
    twice = whole(4, path[:12], spans=False)
    again = PrefixCache(RECURRENT.layout, budget=PLENTY)
    assert recover_index(again, [*records, twice], FINGERPRINT) == [twice]


def test_whole_states_need_their_spans() -> None:
    path = as_tokens(range(30))
    alone = whole(1, path[:12], spans=True)
    cache = PrefixCache(EVERYTHING.layout, budget=PLENTY)
    assert recover_index(cache, [alone], FINGERPRINT) == [alone]
    cache = recovered(span(2, path, 0), alone, stack=EVERYTHING)
    trie = cache.tries.get(NAMESPACE)
    assert trie is not None
    (node,) = (node for node in trie.nodes() if node.persisted_checkpoint is not None)
    assert (node.end, node.persisted_end) == (12, 12)


@pytest.mark.parametrize("layout", [KV.layout, RECURRENT.layout, EVERYTHING.layout])
def test_inconsistent_records_are_collected(layout: Layout) -> None:
    path = as_tokens(range(30))
    bad = [
        span(1, path, 0, tokens=path[:29].tobytes()),
        span(2, path, 0, tokens=path.tobytes()[:-1]),
        sealed(replace(whole(3, path, spans=False), end=0, tokens=b""), path[:0]),
        span(4, path, 9, prefix=b"none"),
    ]
    cache = PrefixCache(layout, budget=PLENTY)
    assert recover_index(cache, bad, FINGERPRINT) == bad
    assert len(cache.tries) == 0
    assert check.problems(cache) == []


FIELDS: dict[str, object] = {
    "kind": RecordKind.CHECKPOINT,
    "tenant": OTHER.tenant,
    "start": 9,
    "end": 21,
    "prefix": digest(as_tokens(range(1, 11))),
    "digest": bytes(16),
    "tokens": as_tokens(range(11, 21)).tobytes(),
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("layout", [KV.layout, RECURRENT.layout, EVERYTHING.layout])
def test_each_field_of_a_record_counts(layout: Layout, field: str) -> None:
    path, before = as_tokens(range(20)), as_tokens(range(1, 11))
    records = [span(1, path[:10], 0), span(2, before, 0), span(3, path, 10)]
    records += [span(number, path[: number - 3], 0, tenant=OTHER.tenant) for number in (12, 13)]
    records.append(replace(records.pop(2), **{field: FIELDS[field]}))  # type: ignore[arg-type]
    cache = PrefixCache(layout, budget=PLENTY)
    ascending = sorted(records, key=lambda record: record.start)
    assert [r.id for r in recover_index(cache, ascending, FINGERPRINT)] == [3]


def test_another_models_record_is_of_no_use() -> None:
    record = span(1, as_tokens(range(20)), 0)
    assert recover_index(PrefixCache(KV.layout, budget=PLENTY), [record], "another") == [record]


def test_any_bit_of_a_records_own_tokens() -> None:
    path = as_tokens(np.random.default_rng(1).integers(0, 150_000, 40))
    first, second = span(1, path[:25], 0), span(2, path, 25)
    for bit in range(8 * len(first.tokens)):
        tokens = bytearray(first.tokens)
        tokens[bit // 8] ^= 1 << bit % 8
        cache = PrefixCache(KV.layout, budget=PLENTY)
        flipped = replace(first, tokens=bytes(tokens))
        assert recover_index(cache, [flipped, second], FINGERPRINT) == [flipped, second]
        assert len(cache.tries) == 0


def test_long_conversations_are_recovered_in_little_memory() -> None:
    path = as_tokens(range(60_000))
    ends = range(100, 60_001, 100)
    records = [span(end, path[:end], end - 100) for end in ends]
    cache = PrefixCache(KV.layout, budget=PLENTY)
    tracemalloc.start()
    try:
        assert recover_index(cache, records, FINGERPRINT) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000, "its tokens are 240,000 bytes"
    trie = cache.tries.get(NAMESPACE)
    assert trie is not None
    assert trie.match(path).length == len(path)
