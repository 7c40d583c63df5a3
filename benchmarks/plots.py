# /// script
# dependencies = ["matplotlib>=3.10"]
# ///
"""Draw the benchmarks' results as SVG.

    uv run --script benchmarks/plots.py --side SIDE.json --sharing SHARING.json --out benchmarks
    uv run --script benchmarks/plots.py --replay REPLAY.json --out benchmarks
    uv run --script benchmarks/plots.py --fairness FAIRNESS.json --out benchmarks

Each is what `--out` of `side_by_side.py`, `decode_sharing.py` or `replay.py`, or `--json` of
`fairness.py` wrote.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

# The same input gives the same file.
plt.rcParams |= {"svg.hashsalt": "umbel", "font.size": 9, "axes.spines.top": False}
plt.rcParams |= {"axes.spines.right": False, "svg.fonttype": "none"}
COLOURS = ("#2a9d8f", "#b0b0b0")
OF_ORDERS = {"FCFS": "#b0b0b0", "LPM": "#e9c46a", "VTC": "#e76f51", "umbel": COLOURS[0]}


def side(found: dict[str, Any], path: Path) -> None:
    """Draw the agents' times to first token, by turn, and the wall times."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8))
    turns = len(next(iter(found.values()))["turns"][0])
    for axis, turn in zip(axes, range(turns), strict=False):
        for colour, (name, result) in zip(COLOURS, found.items(), strict=True):
            times = sorted(agent[turn]["ttft"] for agent in result["turns"])
            axis.step(times, range(1, len(times) + 1), color=colour, label=name, where="post")
        axis.set(title=f"Agents with a first token, turn {turn + 1}", xlabel="seconds", ylim=0)
        axis.legend(frameon=False, loc="lower right")
    walls = [result["wall"] for result in found.values()]
    bars = axes[-1].barh(list(found), walls, color=COLOURS)
    axes[-1].bar_label(bars, fmt="%.1f s", padding=3)
    axes[-1].set(title="Wall time", xlabel="seconds", xlim=(0, max(walls) * 1.25))
    axes[-1].invert_yaxis()
    _save(figure, path)


def sharing(found: list[dict[str, Any]], path: Path) -> None:
    """Draw step time and KV memory by rows and shared prefix."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    labels = [f"{row['rows']} × {row['shared']:,}" for row in found]
    for axis, key, unit, scale in (
        (axes[0], "step_ms", "ms a step", 1.0),
        (axes[1], "kv_bytes", "GiB of keys and values", 2**30),
    ):
        for offset, colour, name in zip((-0.2, 0.2), COLOURS, ("umbel", "mlx-lm"), strict=True):
            for index, row in enumerate(found):
                if row[name] is None:
                    axis.text(index + offset, 0, " out of memory", rotation=90, ha="center")
                    continue
                height = row[name][key] / scale
                label = name if index == 0 else None
                axis.bar(index + offset, height, 0.38, color=colour, label=label)
        axis.set(ylabel=unit)
        axis.set_xticks(range(len(labels)), labels, rotation=40, ha="right")
        axis.legend(frameon=False)
    _save(figure, path)


def replay(found: dict[str, Any], path: Path) -> None:
    """Draw hit ratios by budget, between those of Belady's order and of a cache without end."""
    shown: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        if row["trace"] in {"claude_code", "mooncake_synthetic"}:
            shown.setdefault((row["trace"], row["sessions"]), []).append(row)
    paged = found["paged"]
    figure, axes = plt.subplots(1, len(shown), figsize=(2.6 * len(shown), 2.8), sharey=True)
    for axis, ((trace, sessions), rows) in zip(axes, shown.items(), strict=True):
        _ratios(axis, rows)
        if sessions == paged["sessions"]:
            at = [paged["budget"] / 1e6]
            axis.plot(at, [paged["disk"]], "D", color=COLOURS[0], label="umbel with disk")
            axis.legend(frameon=False, loc="lower right")
        axis.set_title(f"{sessions} agents" if sessions else trace.replace("_", " "))
    axes[0].set_ylabel("prompt tokens restored")
    _save(figure, path)


def _ratios(axis: Any, rows: list[dict[str, Any]]) -> None:
    budgets = [row["budget"] / 1e6 for row in rows]
    for key, name, colour, style in (
        ("endless", "without end", "#b0b0b0", ":"),
        ("best", "Belady", "#e76f51", "--"),
        ("umbel", "umbel", COLOURS[0], "-"),
    ):
        means = [sum(row[key]) / len(row[key]) for row in rows]
        axis.plot(budgets, means, color=colour, linestyle=style, marker=".", label=name)
    axis.set(xlabel="million tokens in memory", xscale="log", ylim=(0, 1))
    axis.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axis.minorticks_off()


def fairness(found: dict[str, Any], path: Path) -> None:
    """Draw how long light tenants wait, how far tenants are apart, and what it costs."""
    shown = (row for row in found["rows"] if row["workload"] == "skewed")
    skewed = [row for row in shown if row["order"] in OF_ORDERS]
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.8))
    for row in skewed:
        colour, name = OF_ORDERS[row["order"]], row["order"]
        waits = [max(seconds, 0.01) for seconds in row["waits"]]
        axes[0].plot(waits, range(1, len(waits) + 1), color=colour, label=name)
        times, gaps = zip(*row["gaps"], strict=True)
        axes[1].plot(times, [max(gap, 100) for gap in gaps], color=colour)
        if row["bound"] and name != "umbel":
            axes[1].axhline(row["bound"], color=colour, linestyle=":", label="VTC's bound")
    axes[0].set(title="Light tenants' requests, %", xlabel="seconds in the queue", xscale="log")
    axes[0].legend(frameon=False, loc="lower right")
    axes[1].set(title="Service gap until then", xlabel="seconds", yscale="log")
    axes[1].set_xlim(0, found["seconds"])
    axes[1].legend(frameon=False, loc="lower right")
    speeds = [row["throughput"] for row in skewed]
    names = [row["order"] for row in skewed]
    bars = axes[2].barh(names, speeds, color=[OF_ORDERS[name] for name in names])
    axes[2].bar_label(bars, fmt="{:,.0f}", padding=3)
    axes[2].set(title="Tokens/s", xlim=(0, max(speeds) * 1.25))
    axes[2].invert_yaxis()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    print(path)


def main() -> None:
    """Draw what was given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--side", type=Path)
    parser.add_argument("--sharing", type=Path)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--fairness", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    if options.side:
        found = json.loads(options.side.read_text())
        side(found, options.out / "side_by_side.svg")
    if options.sharing:
        sharing(json.loads(options.sharing.read_text()), options.out / "decode_sharing.svg")
    if options.replay:
        replay(json.loads(options.replay.read_text()), options.out / "replay.svg")
    if options.fairness:
        fairness(json.loads(options.fairness.read_text()), options.out / "fairness.svg")


if __name__ == "__main__":
    main()
