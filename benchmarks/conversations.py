"""Agents in long conversations: umbel over its Unix socket beside mlx_lm.server, in one run.

    uv run python benchmarks/conversations.py --preset small
    uv run python benchmarks/conversations.py --model DIR --preset crowd --processes 2
    uv run python benchmarks/conversations.py --shape 8b --preset mixed --limit 90
    uv run python benchmarks/conversations.py --agents 4 --shared 2000 [-- FLAGS OF SERVE]

All agents start at once, or, in `mixed`, one after another. An agent asks its next question when
its answer has ended, or, with --lockstep, when the answers of all agents have ended. Lengths are
the same in each run. With --limit a server is stopped after that many seconds of conversation, and
the answers that ended until then are reported. If mlx_lm.server runs out of memory, it can compute
its prompts one by one (--theirs "--prompt-concurrency 1"). Every process starts with an empty
cache. Compiled kernels and measurements, which servers keep for later starts, are empty for a
server's first process only; with --state FOLDER an earlier run has left them there.
"""

import argparse
import asyncio
import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import aiohttp
from conversations_report import by_turn, over_all, report, report_ended, turns_of
from model_folders import FOLDERS
from side_by_side import ask, connected, export_embedded, peak_mib, server
from workload import Agent, Answer, Texts, Workload, crowd, drive

HERE = Path(__file__).resolve().parent
PRESETS = {
    "crowd": Workload(32, 4, 7900, 0, 60, 128),
    "private": Workload(8, 3, 4000, 12_000, 60, 128),
    "hybrid": Workload(16, 2, 7900, 0, 60, 128),
    "mla": Workload(16, 2, 7900, 0, 60, 128),
    "stream": Workload(1, 20, 8000, 0, 60, 128),
    "small": Workload(6, 8, 0, 0, 40, 16),
    "mixed": Workload(16, 6, 10_000, 0, 120, 24, 4000, 250, 3.0, 1.0),
    "tiny": Workload(2, 2, 40, 20, 12, 4),
    "tiny-mixed": Workload(3, 2, 200, 0, 12, 3, 60, 8, 0.3, 0.1),
}
_START = 900.0
_WRITE = 60.0
_LINES = 20  # of a log that are shown
_DYING = 2.0  # seconds after a failure in which a server may still end by itself
_SETTLE = 0.5  # seconds after the last token until a server has stored the state that it keeps
_UNCHANGED, _WRITTEN = 3.0, 60.0  # seconds until copies for the disk are gone: of one, of all


@dataclass
class Result:
    """One process of one server.

    Attributes:
        name: of the server.
        process: 1 for its first process.
        start_s: from its start to the end of its first answer, to another prompt.
        wall_s: of all turns, or until the limit.
        complete: False if the limit ended the run.
        peak_mib: peak memory of the process; 0 if the system does not say.
        load: the machine's load average of the last minute, at the end.
        record: of `recorder.py`, after the last turn.
        operations: of the steps of one more turn, which is not timed; None if not asked for.
        one_by_one: why umbel decodes one by one; None if it does not.
        answers: `[agents][turns]`; after the limit, agents have different numbers of turns.
    """

    name: str
    process: int
    start_s: float
    wall_s: float
    complete: bool
    peak_mib: float
    load: float
    record: dict[str, Any]
    operations: list[int] | None
    one_by_one: str | None
    answers: list[list[Answer]]


class Server:
    """A server that runs under `recorder.py`.

    Args:
        process: of it.
        folder: for the records.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self._folder = folder
        self._written = 0

    def begin(self, *commands: str) -> None:
        """Send commands, and have the steps so far forgotten; returns when that is done."""
        for command in (*commands, "clear"):
            self._tell(command)
        self.record()

    def _tell(self, command: str) -> None:
        assert self.process.stdin is not None  # noqa: S101  (it was started with a pipe)
        self.process.stdin.write(f"{command}\n".encode())
        self.process.stdin.flush()

    def record(self) -> dict[str, Any]:
        """Ask for a record, wait for it and read it."""
        self._written += 1
        path = self._folder / f"record{self._written}.json"
        self._tell(f"write {path}")
        end = time.monotonic() + _WRITE
        while not path.exists():
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError("the server wrote no record")
            time.sleep(0.01)
        found: dict[str, Any] = json.loads(path.read_text())
        return found


async def measure(
    name: str, number: int, running: Server, address: str, model: Path, options: argparse.Namespace
) -> Result:
    """Wait until a new server answers, and run the conversations against it."""
    start = time.perf_counter()
    unix = address.startswith("/")
    connector = aiohttp.UnixConnector(address, limit=0) if unix else aiohttp.TCPConnector(limit=0)
    url = "http://localhost" if unix else address
    workload: Workload = options.workload
    async with connected(connector, url, running.process, _START) as session:
        await ask(session, [{"role": "user", "content": "warm up"}], 4)
        why = await one_by_one(session) if name == "umbel" else None
        start = time.perf_counter() - start
        agents = crowd(session, workload, Texts(model))
        running.begin()
        began = time.perf_counter()
        complete = True
        try:
            async with asyncio.timeout(options.limit) as limit:
                await drive(agents, workload, lockstep=options.lockstep)
        except Exception:
            if not limit.expired():
                report_ended(name, [agent.answers for agent in agents])
                raise
            complete = False
        wall = time.perf_counter() - began
        await asyncio.sleep(_SETTLE)
        record = running.record()
        answers = [agent.answers[: workload.turns] for agent in agents]
        peak, load = peak_mib(running.process.pid), os.getloadavg()[0]
        record["held_bytes"] = await held(running)
        wanted = options.operations and complete
        counted = await count(running, agents, workload) if wanted else None
    return Result(name, number, start, wall, complete, peak, load, record, counted, why, answers)


async def held(running: Server) -> int | None:
    """Bytes of state that a server holds when no copies for the disk are left and they are stable.

    Stable bytes alone do not show that: copies of conversations of equal length follow each other.
    """
    end = time.monotonic() + _WRITTEN
    last, now = None, running.record()
    while (now["copies_bytes"] or now["held_bytes"] != last) and time.monotonic() < end:
        await asyncio.sleep(_UNCHANGED)
        last, now = now["held_bytes"], running.record()
    found: int | None = now["held_bytes"]
    return found


async def one_by_one(session: aiohttp.ClientSession) -> str | None:
    """Ask umbel why it decodes one by one, if it does."""
    async with session.get("/status") as response:
        why: str | None = (await response.json())["model"]["one_by_one"]
        return why


async def count(running: Server, agents: list[Agent], workload: Workload) -> list[int]:
    """Count the operations of each step in one more turn of all agents."""
    running.begin("count")
    await asyncio.gather(*(a.talk(a.questions[workload.turns]) for a in agents))
    found: list[int] = running.record()["operations"]
    return found


def run(name: str, number: int, model: Path, folder: Path, options: argparse.Namespace) -> Result:
    """Measure one process of a server. If it fails, print the fault from its log."""
    own = Path(tempfile.mkdtemp(prefix=f"{name}{number}", dir=folder))
    command = [sys.executable, str(HERE / "recorder.py"), name]
    if name == "umbel":
        command[-1] = "traced_umbel" if options.trace else name
        address = str(own / "u.sock")
        command += ["serve", "--model", str(model), "--socket", address]
        command += ["--disk-dir", str(own / "disk"), *options.flags]
    else:
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        command += ["--model", str(model), "--port", str(port), "--log-level", "ERROR"]
        command += shlex.split(options.theirs)
    log = own / "log"
    try:
        with server(command, log, environment(name, options.state or folder)) as process:
            running = Server(process, own)
            try:
                return asyncio.run(measure(name, number, running, address, model, options))
            except Exception:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(_DYING)
                    print(f"{name}, process {number}, ended with status {status}", file=sys.stderr)
                raise
    except Exception:
        print("\n".join(first_fault(log.read_text(errors="replace"))), file=sys.stderr)
        raise


def first_fault(log: str) -> list[str]:
    """Find the end of a log's first traceback, or of the log. Later tracebacks follow from it.

    The line before a traceback names its thread, the one after it the exception.
    """
    lines = log.splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith("Traceback")), None)
    if first is None:
        return lines[-_LINES:]
    inner = (n for n in range(first + 1, len(lines)) if not lines[n].startswith(" "))
    last = next(inner, len(lines))
    return [*lines[max(0, first - 1) : first], *lines[max(first, last - _LINES) : last + 1]]


def environment(server_name: str, folder: Path) -> dict[str, str]:
    """Environment that has a server keep its files for later processes in a folder of the run."""
    state = folder.resolve() / f"state-{server_name}"
    # mlx_lm.server lists the hub's folder, and fails where there is none.
    (state / "cache" / "huggingface" / "hub").mkdir(parents=True, exist_ok=True)
    kept = {
        "XDG_CACHE_HOME": "cache",  # umbel's measurements
        "XDG_CONFIG_HOME": "config",
        "MLX_PTX_CACHE_DIR": "kernels",
        "CUDA_CACHE_PATH": "driver",
    }
    paths = {name: str(state / part) for name, part in kept.items()}
    return environment_of_source() | paths | {"PYTHONFAULTHANDLER": "1"}


def environment_of_source() -> dict[str, str]:
    """Environment that has a process import this checkout's umbel, and use no network."""
    paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}


def free_port() -> int:
    """Find a free port of the loopback address."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def compare(options: argparse.Namespace) -> list[Result]:
    """Measure all processes of all servers, in turn.

    A server that fails is named, and the others are measured all the same. An interrupt ends the
    run; the results until then are returned.
    """
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="talk") as name, model_folder(options) as model:
        for number in range(1, options.processes + 1):
            for one in ("umbel", "mlx_lm") if options.only is None else (options.only,):
                try:
                    results.append(run(one, number, model, Path(name), options))
                except (aiohttp.ClientError, OSError, RuntimeError) as error:
                    print(f"{one}, process {number}, failed: {error!r}", file=sys.stderr)
                except KeyboardInterrupt:
                    print(f"{one}, process {number}, was interrupted", file=sys.stderr)
                    return results
    return results


@contextmanager
def model_folder(options: argparse.Namespace) -> Iterator[Path]:
    """Folder of the model that both servers load, until the block ends."""
    if options.model is not None:
        yield options.model
        return
    with tempfile.TemporaryDirectory(prefix="model") as name:
        if options.shape is None:
            yield export_embedded(Path(name))
            return
        # A process of its own, so that this one holds no memory of the device.
        program = [sys.executable, str(HERE / "model_folders.py"), options.shape, name]
        subprocess.run(program, check=True, env=os.environ | environment_of_source())
        yield Path(name)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="small")
    for field in fields(Workload):
        kind: Any = field.type
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, help="instead of the preset's")
    parser.add_argument("--model", type=Path, help="a model's folder; else the embedded model")
    parser.add_argument("--shape", choices=sorted(FOLDERS), help="instead, with random weights")
    parser.add_argument("--limit", type=float, help="of each process, seconds of conversation")
    parser.add_argument("--only", choices=("umbel", "mlx_lm"))
    parser.add_argument("--processes", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--lockstep", action="store_true", help="turns begin for all together")
    parser.add_argument("--operations", action="store_true", help="count them, in one more turn")
    parser.add_argument("--trace", action="store_true", help="of umbel's steps, for --json")
    parser.add_argument("--json", type=Path, help="a file for all that was found")
    parser.add_argument("--state", type=Path, help="a folder that later runs start from, too")
    parser.add_argument("--theirs", default="", help="flags of mlx_lm.server, in one argument")
    parser.add_argument("flags", nargs="*", help="of umbel serve, after --")
    options = parser.parse_args(arguments)
    if options.trace and options.json is None:
        parser.error("--trace is for --json's file")
    given = {f.name: getattr(options, f.name) for f in fields(Workload)}
    changed = {name: value for name, value in given.items() if value is not None}
    options.workload = Workload(**asdict(PRESETS[options.preset]) | changed)
    return options


def in_full(result: Result) -> dict[str, Any]:
    """All of a result, with the figures that are printed."""
    turns = [by_turn(answers) for answers in turns_of(result.answers)]
    return {"whole": over_all(result), "turns": turns, **asdict(result)}


def main(arguments: list[str] | None = None) -> int:
    """Run, print and write the results; returns 1 if a server failed or was stopped."""
    options = parse(arguments)
    results = compare(options)
    print(f"{platform.platform()}, {options.workload}, lockstep: {options.lockstep}\n")
    report(results, options.workload.agents * options.workload.turns)
    if options.json:
        found = {
            "workload": asdict(options.workload),
            "lockstep": options.lockstep,
            "results": [in_full(result) for result in results],
        }
        options.json.write_text(json.dumps(found, indent=1))
    return 0 if is_done(results, options) else 1


def is_done(results: list[Result], options: argparse.Namespace) -> bool:
    """True if all processes of all servers ended all turns."""
    expected: int = options.processes * (1 if options.only else 2)
    return sum(result.complete for result in results) == expected


if __name__ == "__main__":
    # So that the servers are stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
