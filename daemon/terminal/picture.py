"""An answer of `/status` as a screen: a head, bars of the budgets, a row for each request."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rich.console import Group, JustifyMethod, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .phases import in_words
from .rates import Rates, Status, engines
from .sizes import age, amount, share

Row = dict[str, Any]

_STATES = {"ready": "green", "loading": "yellow", "stopping": "yellow", "stalled": "red"}
_HELD = ("kv", "checkpoint", "tail", "paging", "transient")  # kinds of the ledger


class Column(NamedTuple):
    """A column of the table of requests.

    Attributes:
        title: its head.
        cell: what it says of a request.
        right: whether it is aligned to the right.
    """

    title: str
    cell: Callable[[Row, Rates], str]
    right: bool = True


def _prefilled(row: Row, _: Rates) -> str:
    return share(min(row["computed_tokens"], row["prompt_tokens"]), row["prompt_tokens"])


def _speed(row: Row, rates: Rates) -> str:
    return _number(rates.of_request(row["request"]))


MODEL = Column("model", lambda row, _: str(row["model"]), right=False)
"""Says whose request it is, where there are several models."""
COLUMNS = (
    Column("conversation", lambda row, _: str(row["conversation"]), right=False),
    Column("tenant", lambda row, _: str(row["tenant"]), right=False),
    Column("status", lambda row, _: str(row["status"]), right=False),
    Column("prompt", lambda row, _: str(row["prompt_tokens"])),
    Column("cached", lambda row, _: share(row["cached_tokens"], row["prompt_tokens"])),
    Column("prefilled", _prefilled),
    Column("out", lambda row, _: str(row["output_tokens"])),
    Column("tokens/s", _speed),
)
"""What a row says of a request that runs, or was preempted and waits for memory."""


def picture(status: Status, rates: Rates) -> Group:
    """Draw an answer of `/status`."""
    models, told = status.get("models", []), engines(status)
    parts: list[RenderableType] = [_head(status), Text()]
    if not told and status["state"] != "ready":
        parts.append(_start(status))
        return Group(*parts)
    parts += [_budgets(status, told), Text()]
    if told:
        parts += [_speeds(told, rates), Text()]
    several = len(models) > 1
    if several or not told:
        parts += [_models(models), Text()]
    parts.append(_requests(models, rates, (MODEL, *COLUMNS) if several else COLUMNS))
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


def _budgets(status: Status, told: list[Row]) -> Table:
    grid = _grid()
    if told:
        # One ledger has the state of all models; the newest look at it counts.
        memory = max(told, key=lambda engine: float(engine["last_step_at"]))["memory"]
        held = sum(memory[kind] for kind in _HELD)
        grid.add_row(
            Text("state", "dim"),
            _bar(held, memory["budget"]),
            Text(f"{amount(held)} of {amount(memory['budget'])}: {_parts(memory)}"),
        )
    used = status["memory"]
    grid.add_row(
        Text("memory", "dim"),
        Text(),
        Text(f"{amount(used['active'])} in use, {amount(used['peak'])} at the most so far"),
    )
    disks = [slot["disk"] for slot in status["models"] if slot["disk"] is not None]
    if disks:
        nbytes, files = (sum(disk[each] for disk in disks) for each in ("nbytes", "records"))
        faults = [f", {disk['state']}: {disk['reason']}" for disk in disks if disk["state"] != "on"]
        grid.add_row(
            Text("disk", "dim"),
            Text(),
            Text(f"{amount(nbytes)} in {files} files{''.join(faults[:1])}"),
        )
    return grid


def _parts(memory: Status) -> str:
    kinds = [f"{kind} {amount(memory[kind])}" for kind in _HELD if memory[kind]]
    return ", ".join(kinds) or "nothing yet"


def _speeds(told: list[Row], rates: Rates) -> Text:
    prompt = sum(engine["prompt_tokens"] for engine in told)
    cached = sum(engine["prompt_tokens_cached"] for engine in told)
    return Text.assemble(
        ("answers ", "dim"),
        f"{_number(rates.of_engine('generation_tokens'))} tokens/s  ",
        ("prompts ", "dim"),
        f"{_number(rates.of_engine('prefill_tokens'))} tokens/s  ",
        ("cached ", "dim"),
        f"{share(cached, prompt)} of {prompt:,} prompt tokens since the start",
    )


def _models(models: list[Row]) -> Table:
    """Draw a row for each configured model; the default one comes first."""
    numbers = ("weights", "cache", "running", "queued", "waiting", "idle")
    table = _table([("model", False), ("state", False), *((each, True) for each in numbers)])
    for slot in models:
        loaded, engine = slot["state"] == "loaded", slot["engine"]
        cells = (
            slot["name"],
            slot["state"] if slot["failure"] is None else f"failed: {slot['failure']}",
            amount(slot["weight_bytes"]) if loaded else "-",
            "-" if engine is None else amount(_cached(engine["cache"])),
            "-" if engine is None else str(len(engine["running"])),
            str(slot["queued"]),
            str(slot["waiting"]),
            age(slot["idle_seconds"]) if loaded and not slot["using"] else "-",
        )
        table.add_row(*map(Text, cells))
    return table


def _cached(cache: Row) -> float:
    return float(cache["span_bytes"] + cache["checkpoint_bytes"])


def _requests(models: list[Row], rates: Rates, columns: tuple[Column, ...]) -> Group:
    queued = sum(slot["queued"] for slot in models)
    running = [
        row | {"model": slot["name"]}
        for slot in models
        if slot["engine"] is not None
        for row in slot["engine"]["running"]
    ]
    said = Text.assemble((f"{len(running)} running", "bold"), f", {queued} in the queue")
    if not running:
        return Group(said)
    table = _table((column.title, column.right) for column in columns)
    for row in running:
        table.add_row(*(Text(column.cell(row, rates)) for column in columns))
    return Group(said, Text(), table)


def _table(heads: Iterable[tuple[str, bool]]) -> Table:
    """Make a table: the title of each column, and whether it is aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title, right in heads:
        side: JustifyMethod = "right" if right else "left"
        table.add_column(title, justify=side, no_wrap=True, overflow="ellipsis")
    return table


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    for _ in range(3):
        grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=done, width=24)


def _number(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}"
