"""Tables of `conversations.py`: by turn, and over all turns, with ratios."""

import statistics
from collections.abc import Callable, Sequence
from itertools import zip_longest
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
_WITHOUT_RATIO = ("prompt tokens cached", "answers", "steps", _FASTEST, _MEDIAN, _SLOWEST)

Figures = dict[str, float | None]


def turns_of(answers: Sequence[Sequence["Answer"]]) -> list[list["Answer"]]:
    """Group answers by turn.

    Args:
        answers: `[agents][turns]`; one agent may have more than another.
    """
    most = max(map(len, answers), default=0)
    return [[agent[turn] for agent in answers if turn < len(agent)] for turn in range(most)]


def by_turn(answers: Sequence["Answer"]) -> Figures:
    """Figures of one turn of all agents."""
    turns = [answer.turn for answer in answers]
    first = [turn.ttft for turn in turns]
    gaps = [gap for turn in turns for gap in turn.gaps] or [0.0]
    return {
        "wall, s": max(a.end for a in answers) - min(a.start for a in answers),
        "TTFT p50, s": statistics.median(first),
        "TTFT p99, s": percentile(first, 0.99),
        "ITL p50, ms": 1e3 * statistics.median(gaps),
        "ITL p99, ms": 1e3 * percentile(gaps, 0.99),
        "ITL max, ms": 1e3 * max(gaps),
        "prompt tokens computed": sum(turn.prompt - turn.cached for turn in turns),
        "prompt tokens cached": sum(turn.cached for turn in turns),
        "answers": len(turns),
    }


def over_all(result: "Result") -> Figures:
    """Figures of all turns of one process; None for figures that the server does not give."""
    answers = [answer for agent in result.answers for answer in agent]
    first = [answer.turn.ttft for answer in answers]
    gaps = [gap for answer in answers for gap in answer.turn.gaps] or [0.0]
    record, steps, loops = result.record, result.record["steps"], result.record["loops"]
    return {
        "start to first answer, s": result.start_s,
        "wall, s": result.wall_s,
        "processor time, s": record["cpu_s"],
        "answers": len(answers),
        "TTFT p50, s": _some(first, statistics.median),
        "TTFT p99, s": _some(first, lambda all_: percentile(all_, 0.99)),
        "ITL p50, ms": 1e3 * statistics.median(gaps),
        "ITL p99, ms": 1e3 * percentile(gaps, 0.99),
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


def report(results: Sequence["Result"], expected: int) -> None:
    """Print all tables.

    A ratio is mlx_lm.server's figure over umbel's in processes of the same number; it is left out
    if one of the two was stopped.

    Args:
        results: of all processes.
        expected: answers of each process.
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
        if not result.complete:
            ended = sum(map(len, result.answers))
            print(
                f"\n{_SERVERS[result.name]}, process {result.process}: stopped after "
                f"{result.wall_s:.1f} s, when {ended} of {expected} answers had ended."
            )
        if result.one_by_one:
            print(f"It decodes one by one: {result.one_by_one}")


def report_ended(name: str, answers: Sequence[Sequence["Answer"]]) -> None:
    """Print the turns that had ended for all agents before a server failed.

    Args:
        name: of the server.
        answers: `[agents][turns]`; one agent may have more than another.
    """
    turns = list(zip(*answers, strict=False))
    print(f"{_SERVERS[name]} failed before all had ended turn {len(turns) + 1}", flush=True)
    for number, ended in enumerate(turns, 1):
        cells = (f"{figure} {shown(value)}" for figure, value in by_turn(ended).items())
        print(f"turn {number} had ended: {'; '.join(cells)}", flush=True)


def _print_turns(pair: Sequence["Result"]) -> None:
    turns = [[by_turn(answers) for answers in turns_of(result.answers)] for result in pair]
    names = list(next((figures for of_one in turns for figures in of_one), {}))
    print(f"| turn | {' | '.join(names)} |\n|---:|{'---:|' * len(names)}")
    complete = all(result.complete for result in pair)
    for number, figures in enumerate(zip_longest(*turns, fillvalue={}), 1):
        cells = []
        for name in names:
            values = _cells(name, [one.get(name) for one in figures], complete=complete)
            if len(values) > len(pair) and values[-1] == _NONE:
                values.pop()
            cells.append(" · ".join(values))
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
        complete = all(result.complete for result in results if result.process == number)
        for row in rows:
            values = [column[row[0]] for column in columns]
            row.extend(_cells(row[0], values, complete=complete))
    print(f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def _cells(name: str, values: Sequence[float | None], *, complete: bool) -> list[str]:
    """Values in words, and, if there are two, their ratio."""
    texts = [shown(value) for value in values]
    if len(values) == 1:
        return texts
    ours, theirs = values if complete and name not in _WITHOUT_RATIO else (None, None)
    return [*texts, f"{theirs / ours:.2f}" if ours and theirs is not None else _NONE]


def shown(value: float | None) -> str:
    """Text of a figure."""
    if value is None:
        return _NONE
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _print_lengths(result: "Result") -> None:
    """Print mean lengths: an answer may have another number of tokens in the history."""
    answers = [answer for agent in result.answers for answer in agent]
    if not answers:
        return
    given = statistics.fmean(answer.turn.tokens for answer in answers)
    again = statistics.fmean(answer.again for answer in answers)
    last = statistics.fmean(agent[-1].turn.prompt for agent in result.answers if agent)
    print(
        f"\n{_SERVERS[result.name]}, process {result.process}: answers of {given:.1f} tokens are "
        f"{again:.1f} in the history; prompts of the last turn have {last:,.0f}."
        f"{' More than a tenth apart.' if abs(again - given) > _NEAR * given else ''}"
    )
