"""The replay of traces: its bounds are bounds, and its figures those of a calculation by hand."""

import json
import os
import sys
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.cachestore import check

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts, and no package

from replay import measure
from replay_bound import belady, endless, runs
from replay_cache import Replay, replay
from replay_orders import ORDERS, hints, ordered
from replay_traces import (
    Request,
    Session,
    agent,
    chat,
    crowd,
    in_order,
    rooted,
    text_request,
    texts,
)

TRACES = os.environ.get("UMBEL_TRACES")
BUDGET = 5  # tokens

Block = tuple[int, ...]  # the tokens up to its end


def request(time: float, until: float, tokens: Sequence[int]) -> Request:
    """Make a request of blocks of one token."""
    return Request(time, until, np.array(tokens, np.int32), 1, len(tokens))


def in_turn(*prompts: Sequence[int]) -> Session:
    """Make requests that end before the next one begins."""
    return [request(float(number), number + 0.5, tokens) for number, tokens in enumerate(prompts)]


def prompts(longest: int, most: int) -> st.SearchStrategy[list[list[int]]]:
    """Prompts of few different tokens, so that they share beginnings."""
    return st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=longest), max_size=most)


@st.composite
def overlapping(draw: st.DrawFn) -> Session:
    """Requests that may run at once; no two of them begin or end at the same time."""
    found = draw(prompts(6, 9))
    spans = draw(st.lists(st.integers(0, 3), min_size=len(found), max_size=len(found)))
    return [
        request(number, number + span + 0.5 + number / 100, tokens)
        for number, (tokens, span) in enumerate(zip(found, spans, strict=True))
    ]


def some(blocks: frozenset[Block] | set[Block], most: int) -> list[frozenset[Block]]:
    """All subsets of at most so many."""
    sizes = range(min(most, len(blocks)) + 1)
    return [frozenset(chosen) for size in sizes for chosen in combinations(sorted(blocks), size)]


def most_hits(requests: Session, budget: int) -> int:
    """Try all that could be kept, block by block, beside each request and after it."""
    paths = [
        [tuple(each.blocks[: end + 1].tolist()) for end in range(each.length)] for each in requests
    ]

    @cache
    def best(number: int, kept: frozenset[Block]) -> int:
        if number == len(paths):
            return 0
        path = paths[number]
        hits = next((at for at, block in enumerate(path) if block not in kept), len(path))
        beside = budget - len(path)
        choices = {
            after
            for others in some(kept - set(path), max(0, beside))
            for after in some(others | set(path), budget)
        }
        return hits + max(best(number + 1, choice) for choice in choices)

    return best(0, frozenset())


def by_hand() -> Session:
    """Of 5 tokens LRU gives up one of the first prompt's for the third, Belady the second's."""
    return in_turn([1, 2, 3], [4, 5], [6], [1, 2, 3, 7])


def test_figures_are_those_of_a_calculation_by_hand() -> None:
    """Ten prompt tokens: 0.3 without end, 0.2 of LRU, 0.3 of Belady."""
    requests = by_hand()
    paths = runs(requests)
    assert endless(paths) == [0, 0, 0, 3]
    assert replay(requests, Replay(BUDGET)) == [0, 0, 0, 2]
    assert belady(requests, paths, BUDGET) == [0, 0, 0, 3]
    assert ordered(requests, paths, BUDGET, ORDERS["recent"]) == [0, 0, 0, 2]


def test_what_a_request_in_flight_holds_stays() -> None:
    """The first prompt is still answered when the third comes, which so costs the second."""
    requests = by_hand()
    requests[0] = request(0, 2.7, [1, 2, 3])
    cache_ = Replay(BUDGET)
    assert replay(requests, cache_) == [0, 0, 0, 3]
    assert not cache_.over


def test_prompts_in_flight_that_do_not_fit_are_counted() -> None:
    """Two of four tokens at once are more than five."""
    cache_ = Replay(BUDGET)
    assert replay([request(0, 9, range(4)), request(1, 9, range(10, 14))], cache_) == [0, 0]
    assert cache_.over == 1
    assert cache_.cache.tries.size.nbytes <= BUDGET


def test_with_a_disk_nothing_is_lost() -> None:
    """Paged-out state is read back: as many hits as with endless memory."""
    requests = by_hand()
    cache_ = Replay(BUDGET, disk=True)
    assert replay(requests, cache_) == [0, 0, 0, 3]
    assert cache_.read == 3  # nodes are paged out whole
    assert cache_.cache.tries.statistics().page_outs
    assert check.problems(cache_.cache) == []


@given(prompts(3, 5), st.integers(1, 3))
def test_belady_is_the_best_there_is(found: list[list[int]], budget: int) -> None:
    """No choice of blocks after each request gives more hits."""
    requests = in_turn(*found)
    assert sum(belady(requests, runs(requests), budget)) == most_hits(requests, budget)


@given(overlapping(), st.integers(1, 12))
def test_nothing_exceeds_its_bound(requests: Session, budget: int) -> None:
    """Without end as much as Belady, and Belady as much as the daemon and any other order."""
    paths = runs(requests)
    best = sum(belady(requests, paths, budget))
    every = endless(paths)
    assert sum(every) >= best >= sum(replay(requests, Replay(budget)))
    for order in (ORDERS | hints(requests, paths)).values():
        hits = ordered(requests, paths, budget, order)
        assert best >= sum(hits)
        assert all(0 <= hit <= most for hit, most in zip(hits, every, strict=True))


@given(overlapping(), st.integers(1, 12))
def test_runs_and_the_trie_agree_on_the_order_of_recency(requests: Session, budget: int) -> None:
    """Two programs that have nothing in common but the order give the same hits."""
    # The daemon computes the last token of a known prompt again, and makes room for it.
    new = [
        request(each.time, each.until, [*each.blocks.tolist(), 10 + number])
        for number, each in enumerate(requests)
    ]
    expected = replay(new, Replay(budget))
    assert ordered(new, runs(new), budget, ORDERS["recent"]) == expected


@given(overlapping(), st.integers(1, 12), st.booleans())
def test_a_replay_leaves_a_sound_cache(requests: Session, budget: int, disk: bool) -> None:  # noqa: FBT001
    """All leases are closed, the budget is kept, and the trie's invariants hold."""
    cache_ = Replay(budget, disk=disk)
    hits = replay(requests, cache_)
    assert check.problems(cache_.cache) == []
    assert cache_.cache.leases == set()
    assert cache_.cache.tries.size.nbytes <= budget
    assert all(hit < each.length for hit, each in zip(hits, requests, strict=True))


@given(prompts(6, 9))
def test_runs_divide_prompts(found: list[list[int]]) -> None:
    """A prompt's runs are as long as it is, and are used by it."""
    requests = in_turn(*found)
    for number, path in enumerate(runs(requests)):
        assert sum(run.length for run in path) == requests[number].length
        assert all(number in run.uses for run in path)


def test_a_session_of_agents_is_read() -> None:
    """Sub-agents' times may count from their own start; what is too long is left out."""
    plain = {"in": 130, "hash_ids": [1, 2], "stop": "tool_use"}
    child = plain | {"t": 1.0, "hash_ids": [1, 9], "stop": "end_turn"}
    entries = [
        plain | {"t": 0.0, "api_time": 2.5},
        {"t": 5.0, "type": "subagent", "requests": [child, child | {"t": 7.0}]},
        plain | {"t": 8.0, "in": 200_000},
    ]
    found = agent({"block_size": 64, "requests": entries})
    assert [(one.time, one.until, one.final) for one in found] == [
        (0.0, 2.5, False),
        (6.0, 6.0, True),
        (7.0, 7.0, True),
    ]
    assert found[0].tokens.tolist() == list(range(64, 192))
    placed = crowd([found], 3, 60.0, seed=1)
    assert [one.time for one in placed] == sorted(one.time for one in placed)
    assert len({one.blocks[0] for one in placed}) == 3
    together = rooted(placed)
    assert {tuple(one.blocks.tolist()) for one in together} == {(0, 1)}
    assert [one.length for one in together] == [one.length for one in placed]


def test_other_traces_are_read(tmp_path: Path) -> None:
    """Blocks of 512 tokens, the last one cut short; text by four characters."""
    entry = {"timestamp": 2500, "input_length": 600, "hash_ids": [3, 4]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(entry))
    (only,) = chat(tmp_path / "chat.jsonl")
    assert (only.time, len(only.tokens), only.tokens[0]) == (2.5, 600, 1536)
    lines = [{"timestamp": 2e6, "input": "abcdefgh"}, {"timestamp": 1e6, "input": "abcdefg"}]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "chat.jsonl").unlink()
    early, late = texts(tmp_path, seed=0)
    assert late.time - early.time == 1.0
    assert late.tokens[0] == early.tokens[0]
    assert late.tokens[1] != early.tokens[1]
    assert in_order([late, early]) == [early, late]
    assert text_request({}, 0.0, "a" * 9).tokens.tolist() == [0, 0, 1]


@pytest.mark.slow
@pytest.mark.skipif(not TRACES, reason="UMBEL_TRACES does not name the folder of the traces")
def test_real_traces_keep_to_their_bounds() -> None:
    """Every ratio lies between its bounds, and the two simulations agree."""
    rows = measure(Path(TRACES or ""), 1, "odd", orders=True)
    assert rows
    for row in rows:
        (every,), (best,), (own,) = row.endless, row.best, row.umbel
        assert every >= best >= own
        assert all(ratio <= best for (ratio,) in row.orders.values())
        assert row.orders["recent"][0] == pytest.approx(own, abs=2e-3)
