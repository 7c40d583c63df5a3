#!/usr/bin/env python3
"""Writes the tables of docs/models.md, from the table of models and the daemon's arithmetic.

`python docs/generate_models.py` prints the page; `--write` puts it in its place.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from umbel.daemon.config import Settings
from umbel.daemon.models.catalog import SHARED, Entry, table
from umbel.daemon.models.fit import Machine, agents, fit, machine_of

PAGE = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- tables -->\n", "<!-- end of tables -->\n"

_GIB = 1 << 30
_MACS = (16, 32, 64, 128, 192, 512)
_GPUS = (24, 48, 80, 141)
_HISTORIES = (8192, 32768, 131072)
_ROWS = 4  # the largest models of a machine that serve an agent


def page() -> str:
    """Return the page with new tables."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + "".join(_tables()) + END + rest.partition(END)[2]


def _tables() -> Iterator[str]:
    for size in _MACS:
        machine = machine_of(f"{size}GiB", "mac")
        yield from _of_machine(f"A Mac with {size} GB", machine)
    for size in _GPUS:
        machine = machine_of(f"{size}GB", "gpu")
        yield from _of_machine(f"A GPU with {size} GB", machine)
    yield "\n## What they are good for\n\n| model | weights | good for |\n|---|---|---|\n"
    for entry in table().models:
        yield f"| `{entry.repo}` | {entry.quantisation} | {entry.good_for} |\n"
    yield f"\nThe table is of {table().checked}. Newer models come every month: look for names\n"
    yield "with `4bit` or `MXFP4` among those of mlx-community.\n"


def _of_machine(name: str, machine: Machine) -> Iterator[str]:
    usable = machine.memory.usable / _GIB
    yield f"\n### {name}\n\nWeights and state may take {usable:.1f} GiB.\n\n"
    heads = " | ".join(f"{history // 1024}K" for history in _HISTORIES)
    yield f"| model | weights | context | {heads} |\n|---|---:|---:|{'---:|' * len(_HISTORIES)}\n"
    entries = sorted(table().models, key=lambda entry: entry.weight_bytes, reverse=True)
    rows = [row for entry in entries if (row := _row(entry, machine))]
    yield from rows[:_ROWS]


def _row(entry: Entry, machine: Machine) -> str:
    """Return a model's row; empty if it serves no agent."""
    settings = Settings()
    how = fit(entry.facts, machine, settings)
    counts = [
        agents(entry.facts, machine, settings, shared=SHARED, own=history) for history in _HISTORIES
    ]
    if not counts[0]:
        return ""
    cells = " | ".join(str(count or "-") for count in counts)
    weights = f"{how.weight_bytes / _GIB:.1f} GiB"
    return f"| `{entry.repo}` | {weights} | {how.context:,} | {cells} |\n"


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main()
