"""A table of requests, from an answer of `/status`: state, waiting time, tokens and speed."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rich.console import Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from ..quoting import age, amount, share

Row = dict[str, Any]

_WAITS = {
    "tokenize": "reading its prompt",
    "model": "its model is loading",
    "conversation": "behind its conversation",
    "tenant": "behind its tenant's bound",
    "quota": "its tenant's tokens are spent",
    "slot": "no slot",
    "memory": "no memory",
    "disk": "reading from disk",
    "prefix": "another computes its prefix",
}
_RUNNING = ("prefill", "decode")


def engines(status: Row) -> list[Row]:
    """List the engines of all loaded models in an answer of `/status`."""
    return [slot["engine"] for slot in status.get("models", ()) if slot.get("engine") is not None]


class Rates:
    """Growth per second of a daemon's figures, between the last two answers of `/status`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = self._seconds = 0.0
        self._before: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def take(self, status: Row) -> None:
        """Take an answer of `/status`."""
        now, figures = self._clock(), Counter[str]()
        for engine in engines(status):
            figures.update({name: n for name, n in engine.items() if isinstance(n, int | float)})
        for slot in status.get("models", ()):
            figures.update({each["request"]: each["output_tokens"] for each in slot["requests"]})
        self._at, self._seconds = now, now - self._at
        self._before, self._last = self._last, dict(figures)

    def forget(self) -> None:
        """Drop the last answer: another daemon may answer next."""
        self._last = {}

    def of(self, name: str) -> float | None:
        """Return a rate, or None if it is not known.

        Args:
            name: a figure of the engines, which is summed over all models, or the id of a request,
                whose answer's tokens count.
        """
        before, last = self._before.get(name), self._last.get(name)
        if before is None or last is None or last < before or self._seconds <= 0:
            return None
        return (last - before) / self._seconds


class Column(NamedTuple):
    """A column: its title, the text of a request's cell, and its alignment."""

    title: str
    cell: Callable[[Row, Rates], str]
    right: bool = True


def _doing(row: Row, _: Rates) -> str:
    activity = str(row["activity"])
    if activity == "prefill":
        return f"prefill {row['computed_tokens']} of {row['prompt_tokens']}"
    if activity == "memory" and row["needed_bytes"] is not None:
        needed, usable = amount(row["needed_bytes"]), amount(row["usable_bytes"])
        return f"no memory: needs {needed} of {usable}"
    return _WAITS.get(activity, activity)


def _since(row: Row, _: Rates) -> str:
    return age(row["seconds"].get(row["activity"], 0.0))


def _waited(row: Row, _: Rates) -> str:
    return age(sum(seconds for name, seconds in row["seconds"].items() if name in _WAITS))


def _cached(row: Row, _: Rates) -> str:
    return share(row["cached_tokens"], row["prompt_tokens"]) if "prompt_tokens" in row else "-"


def _field(name: str) -> Callable[[Row, Rates], str]:
    return lambda row, _: "-" if row.get(name) is None else str(row[name])


MODEL = Column("model", _field("model"), right=False)
"""Stands first if there are several models."""
COLUMNS = (
    Column("conversation", _field("conversation"), right=False),
    Column("tenant", _field("tenant"), right=False),
    Column("doing", _doing, right=False),
    Column("since", _since),
    Column("waited", _waited),
    Column("prompt", _field("prompt_tokens")),
    Column("cached", _cached),
    Column("out", _field("output_tokens")),
    Column("tokens/s", lambda row, rates: number(rates.of(row["request"]))),
)

_ID = Column("request", _field("request"), right=False)
_PRIORITY = Column("priority", _field("priority"), right=False)
LISTED = (_ID, COLUMNS[0], COLUMNS[1], _PRIORITY, *COLUMNS[2:-1])
"""The columns of `umbel ps`, which asks once and so knows no speeds."""


def requests(
    status: Row, rates: Rates, columns: tuple[Column, ...], most: int | None = None
) -> Group:
    """Draw the requests of an answer of `/status`.

    Args:
        status: the answer.
        rates: of the last two answers.
        columns: of the table, without the model's.
        most: bound of the rows; running requests come first.
    """
    models, arriving = status.get("models", []), status.get("arriving", [])
    running, queued = (sum(numbers) for numbers in zip((0, 0), *map(_counts, models), strict=True))
    head = Text.assemble((f"{running} running", "bold"), f", {queued} in the queue")
    if arriving:
        head.append(f", {len(arriving)} on the way there")
    rows = rows_of(status)
    if not rows:
        return Group(head)
    if len(models) > 1:
        columns = (MODEL, *columns)
    drawn = table((column.title, column.right) for column in columns)
    for row in rows[:most]:
        drawn.add_row(*(Text(column.cell(row, rates)) for column in columns))
    left = running + queued + len(arriving) - len(rows[:most])
    more = [Text(f"and {left} more", "dim")] if left > 0 else []
    return Group(head, Text(), drawn, *more)


def rows_of(status: Row) -> list[Row]:
    """List the requests of an answer of `/status`, each with its model; arriving ones come last."""
    models = status.get("models", [])
    rows = [row | {"model": slot["name"]} for slot in models for row in slot["requests"]]
    return [*rows, *status.get("arriving", [])]


def _counts(slot: Row) -> tuple[int, int]:
    """Count running and waiting requests; a tenant gets no figures, so its rows are counted."""
    if slot["queued"] is not None:
        running = 0 if slot["engine"] is None else len(slot["engine"]["running"])
        return running, slot["queued"]
    running = sum(row["status"] in _RUNNING for row in slot["requests"])
    return running, len(slot["requests"]) - running


def table(heads: Iterable[tuple[str, bool]]) -> Table:
    """Make a table, given each column's title and True if it is aligned to the right."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for title, right in heads:
        side: JustifyMethod = "right" if right else "left"
        made.add_column(title, justify=side, no_wrap=True, overflow="ellipsis")
    return made


def number(rate: float | None) -> str:
    """Write a rate; a dash if it is not known."""
    return "-" if rate is None else f"{rate:.1f}"
