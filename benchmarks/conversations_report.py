"""What `conversations.py` prints: tables by turn, and over the whole, with ratios."""

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from percentiles import percentile

if TYPE_CHECKING:
    from conversations import Result
    from workload import Answer

_SERVERS = {"umbel": "umbel", "mlx_lm": "mlx_lm.server"}
_ORDINALS = ("", "first", "second", "third")
_NEAR = 0.1
_NONE = "–"
_FASTEST = "a loop of Python beside the steps, fastest, ms"
_MEDIAN = "the loop, median, ms"
_SLOWEST = "the loop, slowest, ms"
_WITHOUT_RATIO = ("prompt tokens cached", "steps", _FASTEST, _MEDIAN, _SLOWEST)

Figures = dict[str, float | None]


def by_turn(answers: Sequence["Answer"]) -> Figures:
    """One turn of all agents in figures."""
    turns = [answer.turn for answer in answers]
    first = [turn.ttft for turn in turns]
    gaps = [gap for turn in turns for gap in turn.gaps] or [0.0]
    return {
        "wall, s": max(a.end for a in answers) - min(a.start for a in answers),
        "TTFT p50, s": statistics.median(first),
        "TTFT p99, s": percentile(first, 0.99),
        "ITL p50, ms": 1e3 * statistics.median(gaps),
        "ITL max, ms": 1e3 * max(gaps),
        "prompt tokens computed": sum(turn.prompt - turn.cached for turn in turns),
        "prompt tokens cached": sum(turn.cached for turn in turns),
    }


def over_all(result: "Result") -> Figures:
    """All turns of one process in figures; None for what cannot be had."""
    answers = [answer for agent in result.answers for answer in agent]
    gaps = [gap for answer in answers for gap in answer.turn.gaps] or [0.0]
    record, steps, loops = result.record, result.record["steps"], result.record["loops"]
    return {
        "start to first answer, s": result.start_s,
        "wall, s": result.wall_s,
        "processor time, s": record["cpu_s"],
        "ITL p50, ms": 1e3 * statistics.median(gaps),
        "ITL max, ms": 1e3 * max(gaps),
        "prompt tokens computed": sum(a.turn.prompt - a.turn.cached for a in answers),
        "peak memory of the process, MiB": result.peak_mib or None,
        "peak memory of MLX, MiB": record["peak_bytes"] / 2**20,
        "KV held at the end, MiB": _some(record["held_bytes"], lambda nbytes: nbytes / 2**20),
        "steps": len(steps) or None,
        "step, median, ms": _some(steps, lambda all_: 1e3 * statistics.median(all_)),
        "step, longest, ms": _some(steps, lambda all_: 1e3 * max(all_)),
        _FASTEST: _some(loops, lambda all_: 1e3 * min(all_)),
        _MEDIAN: _some(loops, lambda all_: 1e3 * statistics.median(all_)),
        _SLOWEST: _some(loops, lambda all_: 1e3 * max(all_)),
        "operations of a step, median": _some(result.operations, statistics.median),
        "operations of a step, most": _some(result.operations, max),
    }


def _some(value: Any, of: Callable[[Any], float]) -> float | None:
    return of(value) if value else None


def report(results: Sequence["Result"]) -> None:
    """Print all tables.

    A ratio is mlx_lm.server's figure over umbel's in processes of the same number.
    """
    if not results:
        return
    record = results[0].record
    print(f"{record['device']}, MLX {record['mlx']}, mlx-lm {record['mlx_lm']}")
    loads = ", ".join(f"{result.load:.1f}" for result in results)
    print(f"Load average at the end of each process's turns: {loads}\n")
    numbers = sorted({result.process for result in results})
    for number in numbers:
        pair = [result for result in results if result.process == number]
        names = " · ".join(_SERVERS[result.name] for result in pair)
        which = f", {_ORDINALS[number]} processes" if len(numbers) > 1 else ""
        print(f"By turn{which}: {names}{' · ratio' if len(pair) > 1 else ''}\n")
        _print_turns(pair)
    _print_whole(results, numbers)
    for result in results:
        _print_lengths(result)
        if result.one_by_one:
            print(f"It decodes one by one: {result.one_by_one}")


def report_ended(name: str, answers: Sequence[Sequence["Answer"]]) -> None:
    """Print the turns that had ended for all agents when a server failed.

    Args:
        name: of the server.
        answers: `[agents][turns]`; one agent may have more than another.
    """
    turns = list(zip(*answers, strict=False))
    print(f"{_SERVERS[name]} failed before all had ended turn {len(turns) + 1}", flush=True)
    for number, ended in enumerate(turns, 1):
        cells = (f"{figure} {_shown(value)}" for figure, value in by_turn(ended).items())
        print(f"turn {number} had ended: {'; '.join(cells)}", flush=True)


def _print_turns(pair: Sequence["Result"]) -> None:
    turns = [[by_turn(answers) for answers in zip(*result.answers, strict=True)] for result in pair]
    names = list(turns[0][0])
    print(f"| turn | {' | '.join(names)} |\n|---:|{'---:|' * len(names)}")
    for number, figures in enumerate(zip(*turns, strict=True), 1):
        cells = [
            " · ".join(
                cell for cell in _cells(name, [one[name] for one in figures]) if cell != _NONE
            )
            for name in names
        ]
        print(f"| {number} | {' | '.join(cells)} |")
    print()


def _print_whole(results: Sequence["Result"], numbers: Sequence[int]) -> None:
    found = {(result.process, result.name): over_all(result) for result in results}
    heads, rows = [""], [[name] for name in next(iter(found.values()))]
    for number in numbers:
        columns = [found[number, name] for name in _SERVERS if (number, name) in found]
        which = f", {_ORDINALS[number]}" if len(numbers) > 1 else ""
        heads += [f"{_SERVERS[n]}{which}" for n in _SERVERS if (number, n) in found]
        heads += ["ratio"] * (len(columns) > 1)
        for row in rows:
            row.extend(_cells(row[0], [column[row[0]] for column in columns]))
    print(f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def _cells(name: str, values: Sequence[float | None]) -> list[str]:
    shown = [_shown(value) for value in values]
    if len(values) == 1:
        return shown
    ours, theirs = values if name not in _WITHOUT_RATIO else (None, None)
    return [*shown, f"{theirs / ours:.2f}" if ours and theirs is not None else _NONE]


def _shown(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _print_lengths(result: "Result") -> None:
    """Say how long answers were, and how long they came back: as text they may grow."""
    answers = [answer for agent in result.answers for answer in agent]
    given = statistics.fmean(answer.turn.tokens for answer in answers)
    again = statistics.fmean(answer.again for answer in answers)
    last = statistics.fmean(agent[-1].turn.prompt for agent in result.answers)
    print(
        f"\n{_SERVERS[result.name]}, process {result.process}: answers of {given:.1f} tokens are "
        f"{again:.1f} in the history; prompts of the last turn have {last:,.0f}."
        f"{' More than a tenth apart.' if abs(again - given) > _NEAR * given else ''}"
    )
