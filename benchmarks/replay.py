"""Replay traces of agents through the prefix cache, and compare its hits with the best possible.

    uv run python benchmarks/replay.py --traces DIR [--seeds 3] [--orders] [--out REPLAY.json]

`DIR` has `claude_code/*.json` (of callanjfox/kv-cache-tester), `mooncake_synthetic.jsonl` (of
kvcache-ai/Mooncake) and `magagent`, `miniswe`, `taubench` (of LMCache/lmcache-agent-trace).
Trie, cache and pool are the daemon's own; state is pretended, one byte a token. Requests
begin in the order of time, and hold their path until their answer was complete. Ratios are
tokens restored of prompt tokens; no model is loaded, and no time is measured.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

from replay_bound import Run, belady, endless, runs
from replay_cache import Replay, replay
from replay_orders import ORDERS, hints, ordered
from replay_traces import (
    AGENTS,
    CHAT,
    CROWDS,
    ROOTED,
    TEXTS,
    Session,
    agents,
    chat,
    crowd,
    rooted,
    texts,
)

BUDGETS = (250_000, 500_000, 1_000_000, 2_000_000)  # tokens
SHARES = (16, 8, 4, 2)  # of what a text set's prompts take together, one part in so many
PAGED = (100, 500_000)  # sessions and tokens, for the disk tier
FLOOR = 0.005  # an order that is ever further below LRU does not become the daemon's
LEAST_GAP = 0.001  # between LRU and Belady; below, their distance is no measure
ALL_SESSIONS = {  # ceiling, LRU, Belady: simulated by others on 710 of the same collection
    (12, 250_000): (0.959, 0.787, 0.870),
    (12, 500_000): (0.959, 0.956, 0.959),
    (12, 1_000_000): (0.959, 0.959, 0.959),
    (12, 2_000_000): (0.959, 0.959, 0.959),
    (40, 250_000): (0.962, 0.362, 0.636),
    (40, 500_000): (0.962, 0.708, 0.842),
    (40, 1_000_000): (0.962, 0.913, 0.943),
    (40, 2_000_000): (0.962, 0.956, 0.962),
    (100, 250_000): (0.958, 0.156, 0.483),
    (100, 500_000): (0.958, 0.437, 0.720),
    (100, 1_000_000): (0.958, 0.810, 0.894),
    (100, 2_000_000): (0.958, 0.933, 0.952),
}


@dataclass
class Row:
    """One trace at one budget: ratios, one a seed.

    Attributes:
        trace: its name.
        sessions: where it is made of such; else 0.
        budget: tokens in memory.
        endless: of a cache without end.
        umbel: of the daemon.
        best: of Belady's order.
        over: requests for which there was no room beside those in flight.
        orders: of other orders.
    """

    trace: str
    sessions: int
    budget: int
    endless: list[float] = field(default_factory=list)
    umbel: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    over: int = 0
    orders: dict[str, list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the trace's name in the table."""
        return f"{self.trace} × {self.sessions}" if self.sessions else self.trace

    @property
    def gap(self) -> float:
        """Return the hit ratio that Belady's order has more than the daemon."""
        return mean(self.best) - mean(self.umbel)

    def score(self, order: list[float]) -> str:
        """The part of the gap that an order closes."""
        if self.gap < LEAST_GAP:
            return "–"
        return f"{(mean(order) - mean(self.umbel)) / self.gap:.2f}"

    def line(self) -> str:
        """A line of the table, with what others found on other sessions."""
        there = ALL_SESSIONS.get((self.sessions, self.budget)) if self.trace == AGENTS else None
        ratios = "".join(f"{mean(r):9.3f}" for r in (self.endless, self.umbel, self.best))
        others = " ".join(f"{ratio:.3f}" for ratio in there) if there else ""
        return f"{self.name:24}{self.budget:10,}{ratios}{self.gap:8.3f}{self.over:6}   {others}"


def traces(folder: Path, seed: int, part: str) -> Iterator[tuple[str, int, Session]]:
    """All traces that are there, in this order."""
    if kept := agents(folder / AGENTS, part=part):
        for count, window in CROWDS.items():
            placed = crowd(kept, count, window, seed=seed)
            yield AGENTS, count, placed
            yield ROOTED, count, rooted(placed)
    if (file := folder / f"{CHAT}.jsonl").exists() and part == "all" and not seed:
        yield CHAT, 0, chat(file)
    for name in TEXTS:
        if any((folder / name).glob("*.jsonl")):
            yield name, 0, texts(folder / name, seed=seed, part=part)


def budgets(trace: str, paths: list[list[Run]]) -> list[int]:
    """Tokens to try. The text sets are so small that they would fit into any of the usual."""
    if trace not in TEXTS:
        return list(BUDGETS)
    distinct = sum(run.length for run in {run for path in paths for run in path})
    return [distinct // share for share in SHARES]


def measure(folder: Path, seeds: int, part: str, *, orders: bool) -> list[Row]:
    """Replay all traces at all budgets."""
    rows: dict[tuple[str, int, int], Row] = {}
    for seed in range(seeds):
        for trace, sessions, requests in traces(folder, seed, part):
            paths = runs(requests)
            for step, budget in enumerate(budgets(trace, paths)):
                row = rows.setdefault((trace, sessions, step), Row(trace, sessions, budget))
                enter(row, requests, paths, budget, orders=orders)
    return list(rows.values())


def enter(
    row: Row, requests: Session, paths: list[list[Run]], budget: int, *, orders: bool
) -> None:
    """Replay one trace at one budget."""
    total = sum(request.length for request in requests)
    cache = Replay(budget)
    row.endless.append(sum(endless(paths)) / total)
    row.umbel.append(sum(replay(requests, cache)) / total)
    row.best.append(sum(belady(requests, paths, budget)) / total)
    row.over += cache.over
    for name, order in (ORDERS | hints(requests, paths)).items() if orders else ():
        hits = ordered(requests, paths, budget, order)
        row.orders.setdefault(name, []).append(sum(hits) / total)


def show(rows: list[Row]) -> None:
    """Print the table of the daemon's order, and one line for each other order."""
    print(
        f"{'trace':24}{'budget':>10}{'endless':>9}{'umbel':>9}{'Belady':>9}{'gap':>8}{'over':>6}"
        "   710 sessions: endless, LRU, Belady"
    )
    for row in rows:
        print(row.line())
    for order in rows[0].orders:
        _show_order(order, rows)


def _show_order(order: str, rows: list[Row]) -> None:
    """Print how an order compares with the daemon's, and whether it could take its place."""
    less = [mean(row.orders[order]) - mean(row.umbel) for row in rows]
    runs_below = [
        (tried - own, row)
        for row in rows
        for tried, own in zip(row.orders[order], row.umbel, strict=True)
    ]
    worst, at = min(runs_below, key=lambda found: found[0])
    verdict = "within the floor" if worst >= -FLOOR else "below the floor"
    scores = " ".join(f"{row.score(row.orders[order]):>5}" for row in rows)
    print(
        f"\n{order}: {verdict}; mean {mean(less):+.4f}, best mean {max(less):+.4f}, worst run "
        f"{worst:+.4f} ({at.name}, {at.budget:,})\n  part of the gap: {scores}"
    )


def show_paged(folder: Path, seeds: int, part: str) -> dict[str, float]:
    """Print what the disk tier adds where memory is shortest."""
    sessions, budget = PAGED
    found: dict[str, float] = dict.fromkeys(("endless", "memory", "disk", "read"), 0.0)
    found |= {"sessions": sessions, "budget": budget}
    for seed in range(seeds):
        requests = crowd(agents(folder / AGENTS, part=part), sessions, CROWDS[sessions], seed=seed)
        total = sum(request.length for request in requests) * seeds
        disk = Replay(budget, disk=True)
        found["endless"] += sum(endless(runs(requests))) / total
        found["memory"] += sum(replay(requests, Replay(budget))) / total
        found["disk"] += sum(replay(requests, disk)) / total
        found["read"] += disk.read / total
    print(
        f"\n{sessions} sessions, {budget:,} tokens in memory: " + "without a disk "
        f"{found['memory']:.3f}, with one {found['disk']:.3f}, which is "
        f"{found['disk'] / found['endless']:.1%} of an endless cache's {found['endless']:.3f}; "
        f"{found['read']:.1%} of all prompt tokens were read from it"
    )
    return found


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--seeds", type=int, default=3, help="of the sessions' starts")
    parser.add_argument("--part", choices=("all", "even", "odd"), default="all")
    parser.add_argument("--orders", action="store_true", help="try other orders, too")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    rows = measure(options.traces, options.seeds, options.part, orders=options.orders)
    show(rows)
    paged = show_paged(options.traces, options.seeds, options.part)
    if options.out:
        found = {"rows": [asdict(row) for row in rows], "paged": paged}
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
