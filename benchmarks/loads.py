"""Several presets of `conversations.py`, one after the other, in one table.

    uv run python benchmarks/loads.py --shape 8b --only umbel --limit 90
    uv run python benchmarks/loads.py --presets crowd private --model DIR [-- FLAGS OF SERVE]

All flags but --presets are those of `conversations.py`. Each preset has its own process
of each server; the first one leaves its compiled kernels and measurements for the second one.
"""

import argparse
import json
import platform
import signal
import sys
import tempfile
from pathlib import Path

from conversations import PRESETS, Result, compare, in_full, is_done, model_folder, parse
from conversations_report import over_all, shown

COLUMNS = {
    "ready, s": "start to first answer, s",
    "wall, s": "wall, s",
    "answers": "answers",
    "TTFT p50, s": "TTFT p50, s",
    "p99": "TTFT p99, s",
    "ITL p50, ms": "ITL p50, ms",
    "p99, ms": "ITL p99, ms",
    "max, ms": "ITL max, ms",
    "KV held, MiB": "KV held at the end, MiB",
    "steps": "steps",
}
"""Figures by the heads of their columns."""


def line(preset: str, result: Result) -> str:
    """Row of the table."""
    figures = over_all(result)
    cells = " | ".join(shown(figures[name]) for name in COLUMNS.values())
    name = f"{result.name}, process {result.process}"
    return f"| {preset} | {name}{'' if result.complete else ' (stopped)'} | {cells} |"


def main(arguments: list[str] | None = None) -> int:
    """Measure all loads and print the table; returns 1 if a server failed or was stopped."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["crowd", "mixed"])
    own, rest = parser.parse_known_args(arguments)
    rows, found, done = [], {}, True
    with model_folder(parse(rest)) as model, tempfile.TemporaryDirectory(prefix="loads") as state:
        for preset in own.presets:
            options = parse(["--preset", preset, *rest])
            options.model, options.state = model, options.state or Path(state)
            results = compare(options)
            rows += [line(preset, result) for result in results]
            found[preset] = [in_full(result) for result in results]
            done = done and is_done(results, options)
    print(f"{platform.platform()}\n\n| load | server | {' | '.join(COLUMNS)} |")
    print(f"|---|---|{'---:|' * len(COLUMNS)}")
    print("\n".join(rows))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if done else 1


if __name__ == "__main__":
    # So that the servers are stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
