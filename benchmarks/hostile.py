"""One normal client of a daemon that others attack: what it waits for, and what the daemon takes.

    uv run python benchmarks/hostile.py [--seconds 300] [--beside CHECKOUT] [-- FLAGS OF SERVE]

A quiet phase, the attacks (`attacks.py`), a quiet phase again. With --beside the same is done to
the daemon of another checkout first, such as the commit before. The exit status is 1 if the
normal client got a wrong answer, or if a daemon died or did not end in order.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import attacks
from bystander import NO_ANSWER, Client, Phase, Watch, descriptors, get, peer, wait_until_ready
from percentiles import percentile

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("quiet", "attacked", "after")
_START = 120.0
_STOP = 75.0  # seconds: the grace of requests, of state to be saved, and of the MLX thread
_IDLE = 120.0  # seconds until the daemon must be rid of those that have left
_KINDS = list(attacks.kinds(1))


@dataclass
class Result:
    """Figures of one daemon.

    Attributes:
        phases: by their names.
        attacks: what each kind of attack reported of itself.
        idle_after: seconds from the client's last turn beside the attacks until nothing ran and
            nothing waited; None if that did not come about.
        descriptors: of the daemon, before all of it and at the end.
        exit_status: of the daemon on SIGTERM; None if it did not end, or was not to be ended.
        stop_s: seconds it took to end.
        died: whether it ended before, or answers no more.
    """

    phases: dict[str, Phase]
    attacks: dict[str, Any] = field(default_factory=dict)
    idle_after: float | None = None
    descriptors: tuple[int | None, int | None] = (None, None)
    exit_status: int | None = None
    stop_s: float = 0.0
    died: bool = False

    def holds(self, *, ours: bool) -> bool:
        """Return True if all answers were right and the daemon lived and, if ours, ended well."""
        wrong = sum(phase.wrong for phase in self.phases.values())
        return not wrong and not self.died and (not ours or self.exit_status == 0)


@contextmanager
def daemon(checkout: Path, options: argparse.Namespace, result: Result) -> Iterator[Path]:
    """Run a checkout's daemon until the block ends; yields its socket, which it answers on."""
    with tempfile.TemporaryDirectory(prefix="u") as name:
        folder, path = Path(name), Path(name) / "run" / "u.sock"
        command = [sys.executable, "-m", "umbel", "serve", "--socket", str(path)]
        command += ["--model", str(options.model), "--cache-bytes", "512MiB"]
        command += ["--disk-dir", str(folder / "disk"), "--disk-bytes", "1GiB", *options.flags]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("UMBEL_")}
        environment |= {
            "PYTHONPATH": str(checkout / "src"),
            "XDG_CONFIG_HOME": name,
            "OPENBLAS_NUM_THREADS": "2",
        }
        log = options.log or folder / "log"
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            wait_until_ready(path, process, _START)
            yield path
            result.died |= process.poll() is not None
            start = time.monotonic()
            process.send_signal(signal.SIGTERM)
            result.exit_status = process.wait(_STOP)
            result.stop_s = time.monotonic() - start
        except subprocess.TimeoutExpired:
            result.stop_s = _STOP
        finally:
            process.kill()
            process.wait()


def run(path: Path, options: argparse.Namespace, result: Result) -> None:
    """Measure a daemon that answers on a socket."""
    pid = peer(path)
    client = Client(path, options.patience)
    watch = Watch(path, pid, options.patience)
    client.talk(Phase(), 0)  # a warm-up: the first of each conversation computes its prompt
    before = descriptors(pid)
    for name in PHASES:
        seconds = options.seconds if name == "attacked" else options.quiet
        with watch.over(result.phases[name]):
            if name == "attacked":
                with attacked(path, options, result):
                    client.talk(result.phases[name], seconds)
            else:
                client.talk(result.phases[name], seconds)
        if name == "attacked":
            result.idle_after = idle_after(path)
    result.descriptors = before, descriptors(pid)
    try:
        get(path, "/health")
    except (OSError, HTTPException):
        result.died = True


@contextmanager
def attacked(path: Path, options: argparse.Namespace, result: Result) -> Iterator[None]:
    """Attack for the set time; at the end of the block the attackers' reports are taken."""
    program = [sys.executable, str(Path(attacks.__file__))]
    shared = ["--seconds", str(options.seconds), "--connections", str(options.connections)]
    running = {
        kind: subprocess.Popen([*program, kind, str(path), *shared], stdout=subprocess.PIPE)
        for kind in options.only
    }
    try:
        yield
        for kind, process in running.items():
            output, _ = process.communicate(timeout=attacks.PATIENCE)
            result.attacks[kind] = json.loads(output)
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def idle_after(path: Path) -> float | None:
    """Wait until nothing runs and nothing waits; returns the seconds it took."""
    start = time.monotonic()
    while time.monotonic() - start < _IDLE:
        try:
            status = get(path, "/status")
            if not status["engine"]["running"] and not status["waiting"]:
                return time.monotonic() - start
        except (OSError, HTTPException):
            pass
        time.sleep(0.1)
    return None


def figures(phase: Phase) -> dict[str, float]:
    """A phase in figures."""
    refused = [count for reason, count in phase.errors.items() if reason != NO_ANSWER]
    return {
        "turns": len(phase.waits) + sum(refused),
        "TTFT p50, ms": 1e3 * percentile(phase.waits, 0.5),
        "TTFT p99, ms": 1e3 * percentile(phase.waits, 0.99),
        "TTFT max, ms": 1e3 * percentile(phase.waits, 1),
        "turns without a whole answer": sum(phase.errors.values()),
        "wrong answers": phase.wrong,
        "/health p99, ms": 1e3 * percentile(phase.health, 0.99),
        "/health max, ms": 1e3 * percentile(phase.health, 1),
        "failed probes": phase.failed_probes,
        "peak memory, MiB": phase.rss_mib,
        "most descriptors": float("nan") if phase.descriptors is None else phase.descriptors,
        "most threads": float("nan") if phase.threads is None else phase.threads,
    }


def report(result: Result) -> None:
    """Print what was seen of one daemon."""
    columns = [figures(result.phases[name]) for name in PHASES]
    print("| | quiet | under attack | after |\n|---|---:|---:|---:|")
    for row in columns[0]:
        print(f"| {row} | {' | '.join(_shown(column[row]) for column in columns)} |")
    for name in PHASES:
        for reason, count in result.phases[name].errors.items():
            print(f"\n{name}: {count} × {reason}")
    print("\n| attack | new ones a second | at a time, of | attacker's CPU, s | what came of it |")
    print("|---|---:|---:|---:|---|")
    for kind, found in result.attacks.items():
        reached = f"{found['reached']:,} of {found['most']:,}"
        print(f"| {kind} | {found['rate']:g} | {reached} | {found['cpu_s']:g} | |")
        for variant, outcomes in found["outcomes"].items():
            shown = ", ".join(f"{name} {n:,}" for name, n in sorted(outcomes.items()))
            print(f"| – {variant} | | | | {shown} |")
    idle = "never" if result.idle_after is None else f"{result.idle_after:.1f} s"
    before, after = result.descriptors
    print(
        f"\nNothing ran or waited after: {idle}. Descriptors: {before} before, {after} at the end."
    )
    ending = "died" if result.died else "lived"
    print(f"The daemon {ending}; exit status {result.exit_status} after {result.stop_s:.1f} s.\n")


def compare(before: Result, after: Result) -> None:
    """Print two daemons under attack, and how many times less the second one takes."""
    one, other = (figures(result.phases["attacked"]) for result in (before, after))
    print("| under attack | before | after | ratio |\n|---|---:|---:|---:|")
    for row, value in one.items():
        ratio = f"{value / other[row]:.2f}" if other[row] else "–"
        print(f"| {row} | {_shown(value)} | {_shown(other[row])} | {ratio} |")


def _shown(value: float) -> str:
    return "–" if value != value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR0124, PLR2004


def measure(checkout: Path, options: argparse.Namespace) -> Result:
    """Run and attack a checkout's daemon, or attack the one that is named."""
    result = Result({name: Phase() for name in PHASES})
    if options.socket:
        run(options.socket, options, result)
    else:
        with daemon(checkout, options, result) as path:
            run(path, options, result)
    return result


def main() -> None:
    """Measure one daemon, or two in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=int, default=300, help="of the attacks")
    parser.add_argument("--quiet", type=float, default=30, help="seconds of each quiet phase")
    parser.add_argument("--patience", type=float, default=60, help="seconds a turn may take")
    parser.add_argument("--connections", type=int, default=5000, help="what floods keep open")
    parser.add_argument("--only", type=lambda text: text.split(","), default=_KINDS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose daemon to run")
    parser.add_argument("--beside", type=Path, help="a checkout to measure first")
    parser.add_argument("--socket", type=Path, help="of a daemon that runs, and goes on running")
    parser.add_argument("--log", type=Path, help="a file for the daemon's log")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("flags", nargs="*", help="of umbel serve, after --")
    options = parser.parse_args()
    if unknown := set(options.only) - set(_KINDS):
        parser.error(f"no attack is called {', '.join(unknown)}; there are {', '.join(_KINDS)}")
    if options.socket and options.beside:
        parser.error("--beside starts its daemons itself: leave --socket out")
    results = []
    for checkout in [options.beside, options.checkout] if options.beside else [options.checkout]:
        results.append(measure(checkout, options))
        print(f"## {checkout if not options.socket else options.socket}\n")
        report(results[-1])
    if options.beside:
        compare(*results)
    if options.out:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=1))
    sys.exit(not all(result.holds(ours=not options.socket) for result in results))


if __name__ == "__main__":
    main()
