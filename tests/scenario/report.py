"""Prints the table of docs/internals/exactness.md: `uv run python -m tests.scenario.report`."""

from .. import zoo
from .bench import Bench
from .conversations import SCENARIOS


def main() -> None:
    """Run every scenario on every model; print the largest difference of each model."""
    print("| model | kind | requests | tokens compared | largest \\|Δ log p\\| |")  # noqa: T201
    print("|---|---|---|---|---|")  # noqa: T201
    for name in zoo.NAMES:
        worst, requests, tokens = 0.0, 0, 0
        for scenario in SCENARIOS:
            bench = Bench(name)
            for outcome, _, _ in scenario(bench):
                worst = max(worst, bench.difference(outcome))
                requests += 1
                tokens += len(outcome.tokens)
        print(f"| {name} | {zoo.KINDS[name]} | {requests} | {tokens} | {worst:.1e} |")  # noqa: T201


if __name__ == "__main__":
    main()
