"""`umbel top` and `umbel ps`: a running daemon, drawn from its `/status`."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..cli.client import Client
from ..errors import ClientError
from ..lifecycle.signals import StopSignals
from ..quoting import age, amount, share
from .console import pressed
from .display import phase_words
from .requests import COLUMNS, LISTED, Rates, Row, engines, number, requests, rows_of, table

_EVERY = 1.0  # seconds
_QUIT = "q"
_WIDE = 160  # characters of a line if there is no terminal
_WIDEST = 250  # the same, for a list of requests
_STATES = {"ready": "green", "loading": "yellow", "stopping": "yellow", "stalled": "red"}
_BAR = 24  # characters
_LEAST_WITH_BARS = 80  # characters of a line
_MOST = 100  # requests that are drawn
_HELD = ("kv", "checkpoint", "tail", "paging", "transient")  # kinds of the ledger


async def top(socket: Path, *, once: bool, signals: StopSignals) -> None:
    """Show a daemon until `q` or Ctrl-C (SIGINT), its usual ends; or print its state once.

    Without a terminal that can redraw lines, it prints once.

    Raises:
        ClientError: no daemon answers at the start.
    """
    console, rates = _console(_WIDE), Rates()
    async with Client(socket) as client:
        rates.take(await client.get("/status"))
        if once or not console.is_terminal or console.is_dumb_terminal:
            await asyncio.sleep(_EVERY)
            console.print(await _drawn(client, rates))
        else:
            await _watch(client, rates, console, signals)


async def print_requests(socket: Path, *, json: bool) -> None:
    """Print the requests of a daemon.

    Args:
        socket: of the daemon.
        json: as in `/status`, each with its model.

    Raises:
        ClientError: no daemon answers.
    """
    console = _console(_WIDEST)
    async with Client(socket) as client:
        status = await client.get("/status")
    if json:
        console.print_json(data=rows_of(status))
    else:
        console.print(requests(status, Rates(), LISTED))


def _console(width: int) -> Console:
    wide = None if sys.stdout.isatty() else width
    return Console(width=wide, highlight=False, markup=False, emoji=False)


async def _watch(client: Client, rates: Rates, console: Console, signals: StopSignals) -> None:
    end = asyncio.Event()
    with (
        signals.calling(end.set, signal.SIGINT),
        pressed(lambda key: end.set() if key == _QUIT else None),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while not end.is_set():
            try:
                drawn = await _drawn(client, rates)
            except ClientError as error:  # the daemon may come back
                rates.forget()
                advice = "umbel top looks again each second; q ends it."
                drawn = Group(Text(str(error), "red"), Text(advice, "dim"))
            live.update(drawn, refresh=True)
            try:
                async with asyncio.timeout(_EVERY):
                    await end.wait()
            except TimeoutError:
                continue


async def _drawn(client: Client, rates: Rates) -> Group:
    status = await client.get("/status")
    rates.take(status)
    return picture(status, rates)


def picture(status: Row, rates: Rates) -> Group:
    """Draw an answer of `/status`: a head, bars of the budgets, a row for each request."""
    models = status.get("models", [])
    loaded = any(slot["state"] == "loaded" for slot in models)
    parts: list[RenderableType] = [_head(status), Text()]
    if status["state"] != "ready" and not loaded:
        return Group(*parts, _start(status))
    if status["memory"] is not None:
        parts += [_budgets(status["memory"], status["ledger"], models), Text()]
    if counted := engines(status):
        parts += [_speeds(counted, rates), Text()]
    if len(models) > 1 or not loaded:
        parts += [_models(models), Text()]
    parts.append(requests(status, rates, COLUMNS, _MOST))
    return Group(*parts)


def _head(status: Row) -> Text:
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


def _start(status: Row) -> RenderableType:
    words = Text(phase_words(str(status.get("phase") or "starting")))
    if (progress := status.get("download")) is None:
        return words
    grid = Table.grid(padding=(0, 2))
    grid.add_row(words, _bar(progress["done"], progress["total"]))
    return grid


def _budgets(used: Row, ledger: Row | None, models: list[Row]) -> "_Budgets":
    """Draw the use of memory and disk; the ledger has the state of all models."""
    rows: list[_Budget] = []
    if ledger is not None:
        held = sum(ledger[kind] for kind in _HELD)
        kinds = ", ".join(f"{kind} {amount(ledger[kind])}" for kind in _HELD if ledger[kind])
        words = f"{amount(held)} of {amount(ledger['budget'])}: {kinds or 'nothing yet'}"
        rows.append(_Budget("state", words, _bar(held, ledger["budget"])))
    words = f"{amount(used['active'])} in use, {amount(used['peak'])} at the most so far"
    rows.append(_Budget("memory", words))
    if disks := [slot["disk"] for slot in models if slot["disk"] is not None]:
        nbytes, files = (sum(disk[each] for disk in disks) for each in ("nbytes", "records"))
        faults = [f", {disk['state']}: {disk['reason']}" for disk in disks if disk["state"] != "on"]
        words = f"{amount(nbytes)} in {files} file{'s'[: files != 1]}{''.join(faults[:1])}"
        rows.append(_Budget("disk", words))
    return _Budgets(rows)


class _Budget(NamedTuple):
    label: str
    words: str
    bar: RenderableType = ""


class _Budgets:
    """Lines about budgets.

    A narrow line has no room for bars, and without colours nothing tells the full part of one from
    the empty part: both leave the bars out.
    """

    def __init__(self, rows: list[_Budget]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.max_width >= _LEAST_WITH_BARS and console.color_system and not console.no_color:
            grid = Table.grid(padding=(0, 2), expand=True)
            grid.add_column(width=6)
            grid.add_column(width=_BAR)
            grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
            for row in self._rows:
                grid.add_row(Text(row.label, "dim"), row.bar, Text(row.words))
            yield grid
            return
        for row in self._rows:
            line = Text.assemble((f"{row.label:8}", "dim"), row.words)
            line.truncate(options.max_width, overflow="ellipsis")
            yield line


def _speeds(counted: list[Row], rates: Rates) -> Text:
    prompt = sum(engine["prompt_tokens"] for engine in counted)
    cached = sum(engine["prompt_tokens_cached"] for engine in counted)
    return Text.assemble(
        ("answers ", "dim"),
        f"{number(rates.of('generation_tokens'))} tokens/s  ",
        ("prompts ", "dim"),
        f"{number(rates.of('prefill_tokens'))} tokens/s  ",
        ("cached ", "dim"),
        f"{share(cached, prompt)} of {prompt:,} prompt tokens since the start",
    )


def _models(models: list[Row]) -> Table:
    """Draw a row for each configured model; the default one comes first."""
    numbers = ("weights", "cache", "running", "queued", "waiting", "idle")
    drawn = table([("model", False), ("state", False), *((each, True) for each in numbers)])
    for slot in models:
        loaded, engine = slot["state"] == "loaded", slot["engine"]
        cache = None if engine is None else engine["cache"]
        cells = (
            slot["name"],
            slot["state"] if slot["failure"] is None else f"failed: {slot['failure']}",
            amount(slot["weight_bytes"]) if loaded else "-",
            "-" if cache is None else amount(cache["span_bytes"] + cache["checkpoint_bytes"]),
            "-" if engine is None else str(len(engine["running"])),
            *("-" if slot[each] is None else str(slot[each]) for each in ("queued", "waiting")),
            age(slot["idle_seconds"]) if loaded and slot["using"] == 0 else "-",
        )
        drawn.add_row(*map(Text, cells))
    return drawn


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=done, width=_BAR)
