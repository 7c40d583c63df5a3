"""Compare orders of requests on a server that is not there: who waits, and what it costs.

    uv run python benchmarks/fairness.py [--seed 1] [--json FAIRNESS.json]
    uv run python benchmarks/fairness.py --decisions

No model is loaded, and no time is measured: steps have a price (`--step-ms`, `--row-ms`,
`--token-ms`), and the same seed gives the same figures. Every order serves the same requests to the
last one. With `--decisions`, the time that the daemon's order and scheduler take is measured.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fairness_decisions import bounded, decisions, own_yields, spent, starts, steps
from fairness_orders import Fair, FirstCome, LongestPrefix, Order, VirtualTokenCounter
from fairness_server import Costs, Outcome, Server
from fairness_workload import Workload, crowded, hoarded, skewed
from percentiles import percentile

from umbel.scheduler.order import Policy

NAMES = ("FCFS", "LPM", "VTC", "umbel, no preemption", "umbel")
WORKLOADS = ("skewed", "crowded", "hoarded")
CAPACITY = 1.7  # requests a second that the default costs serve, about
COLUMNS: tuple[str, ...] = ("order", "tokens/s", "of LPM", "while some wait", "answers", "hits")
COLUMNS += ("gap", "bound", "Jain", "light p50", "light p99", "heavy p50", "heavy p99", "preempted")
GAP = 2  # quanta that tenants may be apart before a slot changes hands
LEAST_THROUGHPUT, LEAST_SPEEDUP = 0.95, 5.0


@dataclass(frozen=True)
class Row:
    """Results of one order on one workload; seconds and tokens.

    Attributes:
        workload: its name.
        order: its name.
        throughput: tokens of prompts and answers a second, until all was served.
        while_full: the same while any request waits for a slot.
        answers: answer tokens a second while requests arrived.
        hits: prompt tokens cached, of all.
        gap: the most that two tenants' services moved apart while both waited.
        bound: what theory allows it, if it allows any.
        jain: Jain's index of answer tokens, each tenant's over its max-min fair part.
        light_p50: time in the queue of the light tenants' requests (of all where none is light).
        light_p99: the same.
        heavy_p50: of the first tenant's requests.
        heavy_p99: the same.
        preempted: how often a slot was taken.
        waits: a hundred quantiles of the light tenants' times.
        gaps: seconds, and the gap until then.
    """

    workload: str
    order: str
    throughput: float
    while_full: float
    answers: float
    hits: float
    gap: float
    bound: float | None
    jain: float
    light_p50: float
    light_p99: float
    heavy_p50: float
    heavy_p99: float
    preempted: int
    waits: list[float]
    gaps: list[tuple[float, float]]


def max_min(wanted: list[int], capacity: float) -> list[float]:
    """Share a capacity evenly, where none gets more than it wants."""
    parts = [0.0] * len(wanted)
    left = capacity
    for place, tenant in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        parts[tenant] = min(float(wanted[tenant]), left / (len(wanted) - place))
        left -= parts[tenant]
    return parts


def jain(values: list[float]) -> float:
    """Jain's index: 1 if all are equal, 1 / n if one has all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def bound(name: str, costs: Costs, policy: Policy, outcome: Outcome, answer: int) -> float | None:
    """How far theory lets the services of two tenants move apart while both wait.

    VTC: 2 max(w_p L, w_q M), with the longest prompt L, computed in part, and M the tokens that the
    batch decodes at most. Ours: DLPM's 2 (U + Q), with the quantum Q and U = w_p L + w_q M.
    """
    decoded = costs.decoded * costs.slots * answer
    if name == "VTC":
        return 2 * max(outcome.longest_prompt, decoded)
    if name.startswith("umbel"):
        return 2 * (policy.quantum + outcome.longest_prompt + decoded)
    return None


def orders(policy: Policy, tenants: int) -> dict[str, Callable[[], Order]]:
    """Make one of each order."""
    return dict(
        zip(
            NAMES,
            (
                FirstCome,
                LongestPrefix,
                lambda: VirtualTokenCounter(tenants),
                lambda: Fair(policy, None),
                lambda: Fair(policy, GAP * policy.quantum),
            ),
            strict=True,
        )
    )


def measure(
    name: str, workload: Workload, costs: Costs, policy: Policy, names: Iterable[str] = NAMES
) -> list[Row]:
    """Serve a workload in each order."""
    rows = []
    known = orders(policy, workload.tenants)
    for order in names:
        outcome = Server(workload, known[order](), costs).run()
        throughput = (outcome.prompt + outcome.decoded) / outcome.makespan
        fair = max_min(outcome.wanted, sum(outcome.given))
        satisfied = [g / f for g, f in zip(outcome.given, fair, strict=True) if f]
        first = 1 if workload.has_light else 0
        light = [seconds for queued in outcome.queued[first:] for seconds in queued]
        answer = max(turn.answer for c in workload.conversations for turn in c.turns)
        rows.append(
            Row(
                workload=name,
                order=order,
                throughput=throughput,
                while_full=outcome.in_full / outcome.full if outcome.full else throughput,
                answers=sum(outcome.given) / workload.seconds,
                hits=outcome.cached / outcome.prompt,
                gap=outcome.gap,
                bound=bound(order, costs, policy, outcome, answer),
                jain=jain(satisfied),
                light_p50=percentile(light, 0.5),
                light_p99=percentile(light, 0.99),
                heavy_p50=percentile(outcome.queued[0], 0.5),
                heavy_p99=percentile(outcome.queued[0], 0.99),
                preempted=outcome.preempted,
                waits=[percentile(light, part / 100) for part in range(1, 101)],
                gaps=outcome.gaps,
            )
        )
    return rows


def workloads(seed: int, seconds: float) -> dict[str, Workload]:
    """Make all of them: about two and a half times what the server can do."""
    light = CAPACITY / 2
    return {
        "skewed": skewed(seed, seconds, 4.0, light),
        "crowded": crowded(seed, seconds, 4.0),
        "hoarded": hoarded(seed, seconds, 0.8, light),
    }


def bars(rows: list[Row]) -> list[tuple[str, str, bool]]:
    """Say what was to be reached, what was, and whether that is enough."""
    found = []
    for name in dict.fromkeys(row.workload for row in rows):
        by = {row.order: row for row in rows if row.workload == name}
        ours, prefix = by["umbel"], f"{name}: "
        for what, speed, longest in (
            ("throughput", ours.throughput, by["LPM"].throughput),
            ("throughput while some wait", ours.while_full, by["LPM"].while_full),
        ):
            ratio = speed / longest
            reached = ratio >= LEAST_THROUGHPUT
            found.append((f"{prefix}{what}, of LPM's", f"{ratio:.3f}", reached))
        held = ours.bound is not None and ours.gap <= ours.bound
        found.append((prefix + "gap, of its bound", f"{ours.gap:,.0f}, {ours.bound:,.0f}", held))
        if name != "crowded":
            faster = by["FCFS"].light_p99 / max(ours.light_p99, 1e-9)
            better = faster >= LEAST_SPEEDUP
            found.append((prefix + "light p99, FCFS's over ours", f"{faster:.1f}", better))
    return found


def table(rows: list[Row]) -> str:
    """All figures, in Markdown."""
    lines = [
        f"| | {' | '.join(COLUMNS)} |",
        "|---|---|" + "---:|" * 13,
    ]
    for row in rows:
        longest = next(r for r in rows if (r.workload, r.order) == (row.workload, "LPM"))
        allowed = "–" if row.bound is None else f"{row.bound:,.0f}"
        times = (row.light_p50, row.light_p99, row.heavy_p50, row.heavy_p99)
        cells = [row.workload, row.order, f"{row.throughput:,.0f}"]
        cells += [f"{row.throughput / longest.throughput:.3f}", f"{row.while_full:,.0f}"]
        cells += [f"{row.answers:,.0f}", f"{row.hits:.3f}", f"{row.gap:,.0f}", allowed]
        cells += [f"{row.jain:.3f}", *(f"{seconds:.1f}" for seconds in times), f"{row.preempted}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Read the command line."""
    costs, policy = Costs(), Policy()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=240, help="in which conversations start")
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--step-ms", type=float, default=costs.step * 1e3, help="of each step")
    parser.add_argument("--row-ms", type=float, default=costs.row * 1e3, help="of each decode")
    parser.add_argument("--token-ms", type=float, default=costs.token * 1e3, help="of prefill")
    parser.add_argument("--slots", type=int, default=costs.slots)
    parser.add_argument("--cache", type=int, default=costs.cache, help="tokens not in use")
    parser.add_argument("--quantum", type=float, default=policy.quantum)
    parser.add_argument("--patience", type=int, default=policy.patience)
    parser.add_argument("--looks", type=int, default=policy.looks)
    parser.add_argument("--json", type=Path, help="where all figures go, for plots.py")
    parser.add_argument("--decisions", action="store_true", help="time decisions instead")
    return parser.parse_args()


def main() -> None:
    """Serve each workload in each order, and print what came of it."""
    options = parse()
    if options.decisions:
        print(
            "| tenants | waiting | order, ms | start, ms | step, ms |\n|---:|---:|---:|---:|---:|"
        )
        for tenants, requests in itertools.product((1, 27, 1000), (1_000, 10_000)):
            took = [measured(tenants, requests) for measured in (decisions, starts, steps)]
            cells = (f"{tenants:,}", f"{requests:,}", *(f"{each:.3f}" for each in took))
            print(f"| {' | '.join(cells)} |")
        print("\n| waiting | bound, ms | spent, ms | own, ms |\n|---:|---:|---:|---:|")
        for requests in (100, 1_000, 10_000):
            took = [measured(requests) for measured in (bounded, spent, own_yields)]
            print(f"| {requests:,} | {' | '.join(f'{each:.3f}' for each in took)} |")
        return
    costs = Costs(
        options.step_ms / 1e3,
        options.row_ms / 1e3,
        options.token_ms / 1e3,
        slots=options.slots,
        cache=options.cache,
    )
    policy = Policy(options.quantum, options.patience, options.looks)
    rows = []
    for name, workload in workloads(options.seed, options.seconds).items():
        if name in (options.workload or WORKLOADS):
            rows += measure(name, workload, costs, policy)
    print(table(rows), "", sep="\n")
    for what, figure, reached in bars(rows):
        print(f"{what}: {figure}{'' if reached else '  NOT REACHED'}")
    if options.json:
        found: dict[str, Any] = {"seed": options.seed, "seconds": options.seconds}
        found["rows"] = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
