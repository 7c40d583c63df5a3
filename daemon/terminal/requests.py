"""A row for each request: what it does or waits for, since when, and what it has come to."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rich.console import Group, JustifyMethod
from rich.table import Table
from rich.text import Text

from .rates import Rates
from .sizes import age, amount, share

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


class Column(NamedTuple):
    """A column of the table.

    Attributes:
        title: its head.
        cell: what it says of a request.
        right: whether it is aligned to the right.
    """

    title: str
    cell: Callable[[Row, Rates], str]
    right: bool = True


def _doing(row: Row, _: Rates) -> str:
    """What it does, or what it waits for."""
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


def _speed(row: Row, rates: Rates) -> str:
    return number(rates.of_request(row["request"]))


def _cached(row: Row) -> str:
    return share(row["cached_tokens"], row["prompt_tokens"]) if "prompt_tokens" in row else "-"


MODEL = Column("model", lambda row, _: str(row["model"] or "-"), right=False)
"""Says whose request it is, where there are several models."""
COLUMNS = (
    Column("conversation", lambda row, _: str(row["conversation"]), right=False),
    Column("tenant", lambda row, _: str(row["tenant"]), right=False),
    Column("doing", _doing, right=False),
    Column("since", _since),
    Column("waited", _waited),
    Column("prompt", lambda row, _: str(row.get("prompt_tokens", "-"))),
    Column("cached", lambda row, _: _cached(row)),
    Column("out", lambda row, _: str(row.get("output_tokens", "-"))),
    Column("tokens/s", _speed),
)
"""What a row says of a request."""

_ID = Column("request", lambda row, _: str(row["request"]), right=False)
_PRIORITY = Column("priority", lambda row, _: str(row["priority"]), right=False)
LISTED = (_ID, COLUMNS[0], COLUMNS[1], _PRIORITY, *COLUMNS[2:-1])
"""The columns of `umbel ps`, which looks once and so knows no speeds."""


def requests(
    status: Row, rates: Rates, columns: tuple[Column, ...], most: int | None = None
) -> Group:
    """Draw the requests of an answer of `/status`.

    Args:
        status: the answer.
        rates: knows how fast they are.
        columns: of the table, but for the model's.
        most: rows at most; those that run come first.
    """
    models, arriving = status.get("models", []), status.get("arriving", [])
    running, queued = (sum(numbers) for numbers in zip((0, 0), *map(_counts, models), strict=True))
    said = Text.assemble((f"{running} running", "bold"), f", {queued} in the queue")
    if arriving:
        said.append(f", {len(arriving)} on the way there")
    rows = rows_of(status)
    if not rows:
        return Group(said)
    if len(models) > 1:
        columns = (MODEL, *columns)
    drawn = table((column.title, column.right) for column in columns)
    for row in rows[:most]:
        drawn.add_row(*(Text(column.cell(row, rates)) for column in columns))
    left = running + queued + len(arriving) - len(rows[:most])
    more = [Text(f"and {left} more", "dim")] if left > 0 else []
    return Group(said, Text(), drawn, *more)


def rows_of(status: Row) -> list[Row]:
    """List the requests of an answer of `/status`, each with its model, and those on the way."""
    models = status.get("models", [])
    rows = [row | {"model": slot["name"]} for slot in models for row in slot["requests"]]
    return [*rows, *status.get("arriving", [])]


def _counts(slot: Row) -> tuple[int, int]:
    """How many run and wait; a tenant is told of its own by their rows alone."""
    if slot["queued"] is not None:
        running = 0 if slot["engine"] is None else len(slot["engine"]["running"])
        return running, slot["queued"]
    running = sum(row["status"] in _RUNNING for row in slot["requests"])
    return running, len(slot["requests"]) - running


def table(heads: Iterable[tuple[str, bool]]) -> Table:
    """Make a table: the title of each column, and whether it is aligned to the right."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for title, right in heads:
        side: JustifyMethod = "right" if right else "left"
        made.add_column(title, justify=side, no_wrap=True, overflow="ellipsis")
    return made


def number(rate: float | None) -> str:
    """Write a speed; a dash where there is none yet."""
    return "-" if rate is None else f"{rate:.1f}"
