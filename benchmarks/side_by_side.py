"""umbel beside mlx_lm.server: the same weights, the same agents, in turn, in one run.

    uv run python benchmarks/side_by_side.py [--agents 16] [--words 500] [--turns 2] [--tokens 32]

With --exact it is `umbel serve --exact` beside umbel as it is: what exactness costs.

Both serve the embedded model in fp32 on the CPU (with OpenBLAS, if it is there), or a
directory given by --model. Every agent sends the same system prompt, all at once, then its
next turn as soon as it has its answer. Quote the ratios, not the seconds.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import aiohttp  # isort: skip
from mlx_lm.utils import save_config, save_model
from percentiles import percentile

from umbel.models.load import embedded

_START = 120.0
VOCABULARY = (
    *("plan", "report", "test", "file", "agent", "result", "error", "path", "branch", "change"),
    *("review", "commit", "value", "field", "number", "token", "prompt", "answer", "system"),
    *("cache", "batch", "engine", "queue", "memory", "thread", "stream", "socket"),
)


@dataclass
class Turn:
    """One answer's times, in seconds from its request."""

    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt: int = 0
    cached: int = 0


@dataclass
class Result:
    """One server's run."""

    wall: float
    turns: list[list[Turn]]
    peak_mib: float
    computed: int


def export_embedded(folder: Path) -> Path:
    """Write the embedded model as an mlx-lm directory, so that both read the same weights."""
    import mlx.core as mx  # noqa: PLC0415  (umbel.models comes first)

    parts = embedded.load(mx.float32)
    save_model(folder, parts.model, donate_model=False)
    save_config(parts.config | {"eos_token_id": 2}, config_path=folder / "config.json")
    parts.tokenizer._tokenizer.save_pretrained(folder)  # noqa: SLF001
    return folder


@contextmanager
def server(
    command: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends.

    Args:
        command: of the server.
        log: where it logs to.
        environment: what its environment has besides this one's.
    """
    whole = os.environ | {"OPENBLAS_NUM_THREADS": "2"} | dict(environment or {})
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=whole
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


@asynccontextmanager
async def connected(
    connector: aiohttp.BaseConnector,
    url: str,
    process: subprocess.Popen[bytes],
    patience: float = _START,
) -> AsyncIterator[Any]:
    """Wait until a server answers, at most for some seconds, and keep a session with it."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        end = time.monotonic() + patience
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with session.get("/v1/models") as response:
                    if response.status == 200:  # noqa: PLR2004
                        break
            await asyncio.sleep(0.2)
        else:
            raise TimeoutError("the server did not start")
        yield session


async def ask(session: Any, messages: list[dict[str, str]], tokens: int) -> tuple[str, Turn]:
    """Stream one answer."""
    body = {
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    turn, text, last = Turn(), "", time.perf_counter()
    async with session.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            data = json.loads(line[6:])
            _read_usage(data.get("usage"), turn)
            piece = "".join(c.get("delta", {}).get("content") or "" for c in data["choices"])
            if piece:
                now = time.perf_counter()
                if text:
                    turn.gaps.append(now - last)
                else:
                    turn.ttft = now - last
                text, last = text + piece, now
    return text, turn


def _read_usage(usage: Any, turn: Turn) -> None:
    if usage:
        turn.prompt, turn.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        turn.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def drive(session: Any, options: argparse.Namespace) -> list[list[Turn]]:
    """Let all agents talk at once; returns each agent's turns."""
    rng = random.Random(0)  # noqa: S311  (not a secret)
    system = " ".join(rng.choice(VOCABULARY) for _ in range(options.words))

    async def agent(number: int) -> list[Turn]:
        own = random.Random(number)  # noqa: S311  (same reason)
        messages, turns = [{"role": "system", "content": system}], []
        for _ in range(options.turns):
            question = " ".join(own.choice(VOCABULARY) for _ in range(12))
            messages.append({"role": "user", "content": f"Agent {number}: {question}?"})
            text, turn = await ask(session, messages, options.tokens)
            messages.append({"role": "assistant", "content": text})
            turns.append(turn)
        return turns

    return await asyncio.gather(*(agent(i) for i in range(options.agents)))


async def measure(
    connector: aiohttp.BaseConnector,
    url: str,
    process: subprocess.Popen[bytes],
    options: argparse.Namespace,
) -> Result:
    """Warm a server up with another prompt, then time the agents."""
    async with connected(connector, url, process) as session:
        await ask(session, [{"role": "user", "content": "warm up"}], 4)
        start = time.perf_counter()
        turns = await drive(session, options)
        wall = time.perf_counter() - start
    computed = sum(turn.prompt - turn.cached for agent in turns for turn in agent)
    return Result(wall, turns, peak_mib(process.pid), computed)


def peak_mib(pid: int) -> float:
    """The most memory a process has had, on Linux; 0 elsewhere."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return 0.0
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def run_umbel(
    model: Path, folder: Path, options: argparse.Namespace, *, exact: bool = False
) -> Result:
    """Measure umbel over its Unix socket."""
    path = folder / "u.sock"
    command = [sys.executable, "-m", "umbel", "serve", "--model", str(model)]
    command += ["--exact"] if exact else []
    # A folder of its own: what an earlier run left on disk would be found again.
    command += ["--disk-dir", str(Path(tempfile.mkdtemp(dir=folder)))]
    with server([*command, "--socket", str(path)], folder / "umbel.log") as process:

        async def work() -> Result:
            connector = aiohttp.UnixConnector(str(path), limit=0)
            return await measure(connector, "http://localhost", process, options)

        return asyncio.run(work())


def run_mlx_lm(model: Path, folder: Path, options: argparse.Namespace) -> Result:
    """Measure mlx_lm.server over loopback TCP."""
    program = "import umbel.models; from mlx_lm.server import main; main()"  # same BLAS
    command = [sys.executable, "-c", program, "--model", str(model), "--port", str(options.port)]
    with server([*command, "--log-level", "ERROR"], folder / "mlx_lm.log") as process:

        async def work() -> Result:
            connector = aiohttp.TCPConnector(limit=0)
            url = f"http://127.0.0.1:{options.port}"
            return await measure(connector, url, process, options)

        return asyncio.run(work())


def report(ours: Result, theirs: Result, names: tuple[str, str]) -> None:
    """Print both, and their ratios: times of the second over the first, tokens/s inverted."""
    print(f"| | {names[0]} | {names[1]} | ratio |\n|---|---:|---:|---:|")
    _line("wall, s", ours.wall, theirs.wall)
    for number in range(len(ours.turns[0])):
        a, b = ([agent[number].ttft for agent in result.turns] for result in (ours, theirs))
        _line(f"TTFT p50, turn {number + 1}, s", statistics.median(a), statistics.median(b))
        _line(f"TTFT p99, turn {number + 1}, s", percentile(a, 0.99), percentile(b, 0.99))
    gaps = [
        [gap for agent in result.turns for turn in agent for gap in turn.gaps]
        for result in (ours, theirs)
    ]
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        _line(f"ITL {name}, ms", *(1e3 * percentile(g, share) for g in gaps))
    rates = [
        sum(turn.tokens for agent in result.turns for turn in agent) / result.wall
        for result in (ours, theirs)
    ]
    print(f"| output tokens/s | {rates[0]:.1f} | {rates[1]:.1f} | {rates[0] / rates[1]:.2f} |")
    _line("prompt tokens computed", ours.computed, theirs.computed)
    _line("peak memory, MiB", ours.peak_mib, theirs.peak_mib)


def _line(name: str, ours: float, theirs: float) -> None:
    print(f"| {name} | {ours:.2f} | {theirs:.2f} | {theirs / ours if ours else 0:.2f} |")


def main() -> None:
    """Run both in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--agents", type=int, default=16)
    parser.add_argument("--words", type=int, default=500)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--port", type=int, default=18181)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--exact", action="store_true", help="umbel --exact beside umbel")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="side") as name:
        folder = Path(name)
        model = options.model or export_embedded(folder / "model")
        if options.exact:
            names = "umbel --exact", "umbel"
            theirs = run_umbel(model, folder, options)
        else:
            names = "umbel", "mlx_lm.server"
            theirs = run_mlx_lm(model, folder, options)
        ours = run_umbel(model, folder, options, exact=options.exact)
        report(ours, theirs, names)
        if options.out:
            found = {names[0]: asdict(ours), names[1]: asdict(theirs)}
            options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
