"""A budget of CPU seconds for each test file, so that the suite cannot become slow unnoticed.

The run fails if a file takes more than twice its figure in tests/budget.json. The seconds are those
of the test process and of the child processes it has waited for. Session fixtures count for no
file, because any file may be the first that needs them.

`pytest --write-budget` writes the figures of the files it runs; add `-m slow` for the slow tests.
"""

import json
import os
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

PATH = Path(__file__).with_name("budget.json")
FACTOR = 2.0
SPARE = 5.0
"""Seconds that a file may always take beyond its figure: less is noise."""
FEWEST_FILES = 20
"""Smaller runs are not judged: the speed of the machine cannot be told from them."""
SLOWEST_MACHINE = 2.0
WORST = 10

_SETS = {"not slow and not nightly": "fast", "slow": "slow"}
_SMALLEST = 2.0  # seconds; a file that takes less has no figure


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the children it has waited for."""
    return sum(os.times()[:4])


def limits(seconds: Mapping[str, float], budget: Mapping[str, float]) -> dict[str, float]:
    """Return how many CPU seconds each file may take.

    A slow machine is slow for all files: the figures are scaled by the median file's ratio, from 1
    to `SLOWEST_MACHINE`.
    """
    ratios = [seconds[path] / budget[path] for path in seconds if path in budget]
    scale = min(max(median(ratios), 1.0), SLOWEST_MACHINE) if ratios else 1.0
    return {path: scale * FACTOR * budget.get(path, 0.0) + SPARE for path in seconds}


class CpuBudget:
    """Pytest plugin: measures each test where it runs, and judges the files at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self._set = _SETS.get(config.option.markexpr)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._started = self._last = cpu_seconds()
        self._depth = 0  # of session fixtures that are being set up

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        """Leave out what a session fixture takes."""
        if fixturedef.scope != "session":
            return (yield)
        before = cpu_seconds()
        self._depth += 1
        try:
            return (yield)
        finally:
            self._depth -= 1
            if not self._depth:
                self._started += cpu_seconds() - before

    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        """Leave out the end of a session fixture, which may wait for a daemon."""
        now = cpu_seconds()
        if fixturedef.scope == "session":
            self._started += now - self._last
        self._last = now

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Begin to measure a test."""
        self._started = self._last = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """Note with a phase's report what the phase took."""
        report = yield
        self._last = cpu_seconds()
        report.cpu_seconds = self._last - self._started
        self._started = self._last
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add a phase to its file's sum."""
        self._seconds[report.nodeid.partition("::")[0]] += getattr(report, "cpu_seconds", 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Report each file over its limit as failed, or write the figures."""
        if hasattr(session.config, "workerinput") or self._set is None:
            return
        if session.config.option.write_budget:
            write(self._set, self._seconds)
            return
        budget = read(self._set)
        if not budget or len(self._seconds) < FEWEST_FILES:
            return
        for path, limit in limits(self._seconds, budget).items():
            if self._seconds[path] > limit:
                self._fail(session, path, limit)

    def _fail(self, session: pytest.Session, path: str, limit: float) -> None:
        said = (
            f"{path} took {self._seconds[path]:.0f} s of CPU time; its limit is {limit:.0f} s. "
            "Make its tests cheaper, or raise its figure (CONTRIBUTING.md)."
        )
        report = pytest.TestReport(path, (path, None, "CPU budget"), {}, "failed", said, "call")
        session.config.hook.pytest_runtest_logreport(report=report)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the files that took longest."""
        if len(self._seconds) < FEWEST_FILES:
            return
        budget = read(self._set or "")
        terminalreporter.section(f"{sum(self._seconds.values()):.0f} s of CPU time")
        worst = sorted(self._seconds.items(), key=lambda each: -each[1])[:WORST]
        for path, seconds in worst:
            terminalreporter.line(f"{seconds:6.1f} s of {budget.get(path, 0):5.1f} {path}")


def read(tests: str) -> dict[str, float]:
    """Read each file's figure, in seconds, for the `fast` or the `slow` tests."""
    figures = json.loads(PATH.read_text())
    return {path: of_file[tests] for path, of_file in figures.items() if tests in of_file}


def write(tests: str, seconds: Mapping[str, float]) -> None:
    """Write the figures of the files that have run, and drop those of files that are gone."""
    figures = json.loads(PATH.read_text())
    for path, taken in seconds.items():
        of_file = figures.setdefault(path, {})
        of_file.pop(tests, None)
        if taken >= _SMALLEST:
            of_file[tests] = round(taken)
    kept = {
        path: figures[path]
        for path in sorted(figures)
        if figures[path] and (PATH.parents[1] / path).exists()
    }
    lines = [f"{json.dumps(path)}: {json.dumps(of_file)}" for path, of_file in kept.items()]
    PATH.write_text("{\n  " + ",\n  ".join(lines) + "\n}\n")
