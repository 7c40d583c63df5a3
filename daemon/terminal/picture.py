"""An answer of `/status` as a screen: a head, bars of the budgets, a row for each request."""

from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .phases import in_words
from .rates import Rates, Status, engines
from .requests import COLUMNS, number, requests, table
from .sizes import age, amount, share

Row = dict[str, Any]

_STATES = {"ready": "green", "loading": "yellow", "stopping": "yellow", "stalled": "red"}
_BAR = 24  # characters
_LEAST_WITH_BARS = 80  # characters of a line
_MOST = 100  # requests that are drawn
_HELD = ("kv", "checkpoint", "tail", "paging", "transient")  # kinds of the ledger


def picture(status: Status, rates: Rates) -> Group:
    """Draw an answer of `/status`."""
    models, told = status.get("models", []), engines(status)
    parts: list[RenderableType] = [_head(status), Text()]
    if status["state"] != "ready" and not any(slot["state"] == "loaded" for slot in models):
        parts.append(_start(status))
        return Group(*parts)
    if status["memory"] is not None:
        parts += [_budgets(status["memory"], status["ledger"], models), Text()]
    if told:
        parts += [_speeds(told, rates), Text()]
    several = len(models) > 1
    if several or not any(slot["state"] == "loaded" for slot in models):
        parts += [_models(models), Text()]
    parts.append(requests(status, rates, COLUMNS, _MOST))
    return Group(*parts)


def unreachable(reason: str) -> Group:
    """Draw that no daemon answers."""
    return Group(Text(reason, "red"), Text("umbel top looks again each second; q ends it.", "dim"))


def _head(status: Status) -> Text:
    state = str(status["state"])
    head = Text.assemble(("umbel", "bold"), f" {status['version']}  ")
    if (model := status.get("model")) is not None:
        head.append(f"{model['name']}  ", "bold green")
        head.append(f"{model['context_length']:,} tokens of context on {status['backend']}  ")
    head.append(state, _STATES.get(state, ""))
    pressure = status.get("pressure")
    if pressure is not None and pressure["level"] != "normal":
        head.append(f"  the system is short of memory: {pressure['level']}", "yellow")
    return head


def _start(status: Status) -> RenderableType:
    words = Text(in_words(str(status.get("phase") or "starting")))
    if (progress := status.get("download")) is None:
        return words
    grid = _grid()
    grid.add_row(words, _bar(progress["done"], progress["total"]))
    return grid


def _budgets(used: Row, ledger: Row | None, models: list[Row]) -> "_Budgets":
    """Draw what is taken of memory and disk; the ledger has the state of all models."""
    rows: list[_Budget] = []
    if ledger is not None:
        held = sum(ledger[kind] for kind in _HELD)
        said = f"{amount(held)} of {amount(ledger['budget'])}: {_parts(ledger)}"
        rows.append(_Budget("state", said, _bar(held, ledger["budget"])))
    said = f"{amount(used['active'])} in use, {amount(used['peak'])} at the most so far"
    rows.append(_Budget("memory", said))
    disks = [slot["disk"] for slot in models if slot["disk"] is not None]
    if disks:
        nbytes, files = (sum(disk[each] for disk in disks) for each in ("nbytes", "records"))
        faults = [f", {disk['state']}: {disk['reason']}" for disk in disks if disk["state"] != "on"]
        said = f"{amount(nbytes)} in {files} file{'s'[: files != 1]}{''.join(faults[:1])}"
        rows.append(_Budget("disk", said))
    return _Budgets(rows)


class _Budget(NamedTuple):
    """A line of what is taken."""

    label: str
    said: str
    bar: RenderableType = ""


class _Budgets:
    """Lines of what is taken.

    Bars are left out where they would leave no room for the words, and without colours, where
    nothing tells the full part of one from the empty part.
    """

    def __init__(self, rows: list[_Budget]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw them in the width that there is."""
        if options.max_width >= _LEAST_WITH_BARS and console.color_system and not console.no_color:
            grid = Table.grid(padding=(0, 2), expand=True)
            grid.add_column(width=6)
            grid.add_column(width=_BAR)
            grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
            for row in self._rows:
                grid.add_row(Text(row.label, "dim"), row.bar, Text(row.said))
            yield grid
            return
        for row in self._rows:
            line = Text.assemble((f"{row.label:8}", "dim"), row.said)
            line.truncate(options.max_width, overflow="ellipsis")
            yield line


def _parts(memory: Status) -> str:
    kinds = [f"{kind} {amount(memory[kind])}" for kind in _HELD if memory[kind]]
    return ", ".join(kinds) or "nothing yet"


def _speeds(told: list[Row], rates: Rates) -> Text:
    prompt = sum(engine["prompt_tokens"] for engine in told)
    cached = sum(engine["prompt_tokens_cached"] for engine in told)
    return Text.assemble(
        ("answers ", "dim"),
        f"{number(rates.of_engine('generation_tokens'))} tokens/s  ",
        ("prompts ", "dim"),
        f"{number(rates.of_engine('prefill_tokens'))} tokens/s  ",
        ("cached ", "dim"),
        f"{share(cached, prompt)} of {prompt:,} prompt tokens since the start",
    )


def _models(models: list[Row]) -> Table:
    """Draw a row for each configured model; the default one comes first."""
    numbers = ("weights", "cache", "running", "queued", "waiting", "idle")
    drawn = table([("model", False), ("state", False), *((each, True) for each in numbers)])
    for slot in models:
        loaded, engine = slot["state"] == "loaded", slot["engine"]
        cells = (
            slot["name"],
            slot["state"] if slot["failure"] is None else f"failed: {slot['failure']}",
            amount(slot["weight_bytes"]) if loaded else "-",
            "-" if engine is None else amount(_cached(engine["cache"])),
            "-" if engine is None else str(len(engine["running"])),
            *("-" if slot[each] is None else str(slot[each]) for each in ("queued", "waiting")),
            age(slot["idle_seconds"]) if loaded and slot["using"] == 0 else "-",
        )
        drawn.add_row(*map(Text, cells))
    return drawn


def _cached(cache: Row) -> float:
    return float(cache["span_bytes"] + cache["checkpoint_bytes"])


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    for _ in range(3):
        grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=done, width=_BAR)
