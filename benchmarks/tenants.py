"""How long a light tenant waits for its first token beside a heavy one that fills the daemon.

    uv run python benchmarks/tenants.py [--rounds 4] [-- FLAGS OF SERVE]

Runs `umbel serve` on a private socket with a key for each tenant. In each round the light tenant
sends its requests one after another (or `--together`): alone, and then while the heavy one has
`--heavy` requests at once, each answered one replaced by another. No two prompts begin alike. The
exit status is 1 if the bar is not reached in each round: a p99 of at most twice the one alone, and
one prefill chunk.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bystander import UnixConnection, get, wait_until_ready
from percentiles import percentile

from umbel.daemon.identity.keys import add_key

ROOT = Path(__file__).resolve().parent.parent
WORDS = ("plan", "report", "test", "agent", "river", "answer", "number", "window", "letter")
CHAT = "/v1/chat/completions"
MOST_OF_ALONE = 2.0
_TEXT = re.compile(rb'"content":"[^"]')
_PATIENCE = 600.0
_START = 120.0
_STOP = 90.0
_TOKENS = (32, 64)  # of a heavy answer, the least and the most
_STAGES = ("queue_s", "prefill_s")
_AHEAD = 3.0  # seconds for which the heavy tenant has the daemon for itself


@dataclass
class Round:
    """Times of one round, in seconds.

    Attributes:
        alone: until the first token of each light request.
        beside: the same beside the heavy tenant.
        chunk: until that of a prompt of one prefill chunk, alone.
        step: of a step beside the heavy tenant, in the mean.
        running: requests that ran when the light tenant came.
        waiting: requests that waited then.
        stages: what the log says of the light requests beside the heavy tenant.
    """

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    chunk: float = 0.0
    step: float = 0.0
    running: int = 0
    waiting: int = 0
    stages: list[dict[str, Any]] = field(default_factory=list)


class Daemon:
    """A daemon with two tenants.

    Args:
        path: of its socket.
        log: of it.
        keys: of the tenants.
        words: of a prompt.
    """

    def __init__(self, path: Path, log: Path, keys: dict[str, str], words: int) -> None:
        self.path = path
        self._log = log
        self._keys = keys
        self._words = words

    def ask(
        self,
        tenant: str,
        tokens: int,
        words: int | None = None,
        over: threading.Event | None = None,
    ) -> tuple[float, str]:
        """Send a request with a prompt of its own; returns its TTFT in seconds, and its id.

        Args:
            tenant: who sends it.
            tokens: of the answer, at most.
            words: of the prompt.
            over: when it is set, the request is left.
        """
        own = random.Random()  # noqa: S311  (no secret)
        prompt = " ".join(own.choices(WORDS, k=words or self._words))
        body = {
            "messages": [{"role": "user", "content": f"{own.random()} Tell a story of: {prompt}"}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
        headers = {"Authorization": f"Bearer {self._keys[tenant]}"}
        with closing(UnixConnection(self.path, _PATIENCE)) as connection:
            start = time.monotonic()
            connection.request("POST", CHAT, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:  # noqa: PLR2004
                raise HTTPException(response.read().decode())
            first = None
            for line in response:
                if over is not None and over.is_set():
                    break
                if first is None and _TEXT.search(line):
                    first = time.monotonic() - start
            return first or float("nan"), str(response.getheader("x-request-id"))

    def stages(self, name: str) -> dict[str, Any]:
        """Return the fields of a request's log line."""
        (line,) = re.findall(rf".*event=request request={name} .*", self._log.read_text())
        found = dict(re.findall(r"(\S+)=(\S+)", line))
        return {stage: float(found[stage]) for stage in _STAGES} | {
            "waited_for": found.get("waited_for", "nothing")
        }


@contextmanager
def daemon(options: argparse.Namespace) -> Iterator[Daemon]:
    """Run a daemon until the block ends."""
    with tempfile.TemporaryDirectory(prefix="u") as name:
        folder = Path(name)
        path, keys_file, log = folder / "u.sock", folder / "keys.json", folder / "log"
        keys = {tenant: add_key(keys_file, tenant)[1] for tenant in ("heavy", "light")}
        command = [sys.executable, "-m", "umbel", "serve", "--socket", str(path)]
        command += ["--model", options.model, "--keys-file", str(keys_file), "--no-disk"]
        command += ["--cache-bytes", "1GiB", *options.flags]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("UMBEL_")}
        environment |= {"PYTHONPATH": str(ROOT / "src"), "XDG_CONFIG_HOME": name}
        with log.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            wait_until_ready(path, process, _START)
            yield Daemon(path, log, keys, options.words)
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP)
        finally:
            process.kill()
            process.wait()


@contextmanager
def crowded(server: Daemon, requests: int) -> Iterator[None]:
    """Let the heavy tenant send so many requests at once until the block ends."""
    over = threading.Event()

    def send(number: int) -> None:
        while not over.is_set():
            tokens = _TOKENS[0] + number % (_TOKENS[1] - _TOKENS[0] + 1)
            server.ask("heavy", tokens, over=over)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(requests)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def light(server: Daemon, options: argparse.Namespace) -> list[tuple[float, str]]:
    """Send the light tenant's requests; returns the TTFT of each, and its id."""
    with ThreadPoolExecutor(options.light if options.together else 1) as senders:
        asked = [senders.submit(server.ask, "light", options.tokens) for _ in range(options.light)]
        return [each.result() for each in asked]


def measure(server: Daemon, options: argparse.Namespace) -> Round:
    """Do a round."""
    found = Round(chunk=server.ask("light", 1, options.chunk_words)[0])
    found.alone = [seconds for seconds, _ in light(server, options)]
    with crowded(server, options.heavy):
        time.sleep(_AHEAD)
        before = get(server.path, "/status")
        found.running, found.waiting = len(before["engine"]["running"]), before["waiting"]
        asked = light(server, options)
        found.beside = [seconds for seconds, _ in asked]
        after = get(server.path, "/status")
    steps, taken = (
        after["engine"][name] - before["engine"][name] for name in ("steps", "step_seconds")
    )
    found.step = taken / steps
    found.stages = [server.stages(name) for _, name in asked]
    return found


def report(rounds: list[Round]) -> bool:
    """Print the rounds and whether the bar is reached; returns that."""
    print("| round | alone p50 | p99 | beside p50 | p99 | p99 of alone's | chunk | bar | step |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for number, each in enumerate([*rounds, _all(rounds)], 1):
        alone, beside = (percentile(times, 0.99) for times in (each.alone, each.beside))
        cells = [percentile(each.alone, 0.5), alone, percentile(each.beside, 0.5), beside]
        cells += [beside / alone, each.chunk, _bar(each), each.step]
        name = number if number <= len(rounds) else "all"
        print(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    for number, each in enumerate(rounds, 1):
        print(f"\nround {number}: {each.running} ran and {each.waiting} waited; light requests")
        for stages in each.stages:
            print("  " + ", ".join(f"{name} {value}" for name, value in stages.items()))
    held = sum(percentile(each.beside, 0.99) <= _bar(each) for each in rounds)
    print(f"\nThe bar is reached in {held} of {len(rounds)} rounds.")
    return held == len(rounds)


def _all(rounds: list[Round]) -> Round:
    return Round(
        [seconds for each in rounds for seconds in each.alone],
        [seconds for each in rounds for seconds in each.beside],
        statistics.median(each.chunk for each in rounds),
        statistics.mean(each.step for each in rounds),
    )


def _bar(found: Round) -> float:
    return MOST_OF_ALONE * percentile(found.alone, 0.99) + found.chunk


def main() -> None:
    """Measure, and say whether the bar is reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--heavy", type=int, default=64, help="requests of it at once")
    parser.add_argument("--light", type=int, default=4, help="requests of the other, in turn")
    parser.add_argument("--together", action="store_true", help="these all at once instead")
    parser.add_argument("--words", type=int, default=200, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer of the light tenant")
    parser.add_argument("--chunk-words", type=int, default=470, help="of a prompt of one chunk")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("flags", nargs="*", help="of umbel serve, after --")
    options = parser.parse_args()
    with daemon(options) as server:
        server.ask("light", options.tokens)  # a warm-up
        rounds = [measure(server, options) for _ in range(options.rounds)]
    reached = report(rounds)
    if options.out:
        options.out.write_text(json.dumps([asdict(each) for each in rounds], indent=1))
    sys.exit(not reached)


if __name__ == "__main__":
    main()
