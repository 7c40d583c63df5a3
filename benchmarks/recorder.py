"""Runs a server, times its steps and counts their operations: what `conversations.py` starts.

    python benchmarks/recorder.py umbel|traced_umbel|mlx_lm ARGUMENTS OF ITS COMMAND

Each line on standard input is a command: `clear` empties the record, `count` has the
operations of later steps counted, `write FILE` writes the record. Steps of `traced_umbel` are noted
phase by phase, as `step_trace.py` says. When the input ends, the parent process is gone,
and the process ends too.

A step of umbel is one of `Engine.step` that computes; a step of mlx_lm.server is one of
`BatchGenerator.next`, so that models it serves one by one have none. The operations of a step are
the nodes of the graphs that it gives to `mx.eval` and `mx.async_eval`; what is evaluated by
reading a value is not counted.

After the first step, and every twentieth from there, a loop of Python is timed that is always the
same: machines that lend their processors run half as fast for seconds, and so does every step then.
"""

import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten
from step_trace import StepTrace

_EVERY = 20  # steps
_LOOP = 20_000  # rounds: about a millisecond
_NODE = "shape=rectangle"  # of an operation; arrays have other shapes
_CONNECTIONS = 128  # that wait to be accepted; mlx_lm.server has room for five
_GRACE = 20.0  # seconds to end in order when the parent process is gone


class Recorder:
    """Figures of one server.

    Attributes:
        held: returns the bytes of model state that the server keeps between requests; None as
            long as it has no place for them.
        copies: returns the bytes among them that are copies on their way to the disk.
        trace: of the steps; None where none is wanted.
    """

    def __init__(self) -> None:
        self.held: Callable[[], int] | None = None
        self.copies: Callable[[], int] = lambda: 0
        self.trace: StepTrace | None = None
        self._steps: list[tuple[float, int | None]] = []
        self._operations: int | None = None
        self._cpu = 0.0
        self._loops: list[float] = []

    def watch(self, owner: Any, name: str, computed: Callable[[Any, Any], bool]) -> None:
        """Time a method that does one step.

        Args:
            owner: the class that has it.
            name: of the method.
            computed: says whether a step computed, from the object and what the step returned.
        """
        real = getattr(owner, name)

        def step(server: Any) -> Any:
            if self.trace is not None:
                self.trace.begin()
            start = time.perf_counter()
            result = real(server)
            seconds = time.perf_counter() - start
            if computed(server, result):
                self._steps.append((seconds, self._operations))
                if self.trace is not None:
                    self.trace.end(seconds)
                if len(self._steps) % _EVERY == 1:
                    self._loops.append(loop())
            if self._operations is not None:
                self._operations = 0
            return result

        setattr(owner, name, step)

    def obey(self) -> None:
        """Follow the commands on standard input until it ends; then end the process."""
        for line in sys.stdin:
            command, _, argument = line.strip().partition(" ")
            match command:
                case "clear":
                    self._steps, self._loops, self._cpu = [], [], time.process_time()
                    if self.trace is not None:
                        self.trace.steps = []
                    mx.reset_peak_memory()
                case "count":
                    self._count()
                case "write":
                    self._write(Path(argument))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
        os._exit(1)

    def _count(self) -> None:
        for name in ("eval", "async_eval"):
            setattr(mx, name, self._counting(getattr(mx, name)))
        self._operations = 0

    def _counting(self, real: Callable[..., None]) -> Callable[..., None]:
        def evaluate(*arrays: Any) -> None:
            self._operations = (self._operations or 0) + operations(*arrays)
            real(*arrays)

        return evaluate

    def _write(self, path: Path) -> None:
        record = {
            "device": str(mx.default_device()),
            "mlx": version("mlx"),
            "mlx_lm": version("mlx-lm"),
            "cpu_s": time.process_time() - self._cpu,
            "steps": [seconds for seconds, _ in self._steps],
            "loops": self._loops,
            "operations": [count for _, count in self._steps if count is not None],
            "peak_bytes": mx.get_peak_memory(),
            "held_bytes": None if self.held is None else self.held(),
            "copies_bytes": self.copies(),
            "trace": [] if self.trace is None else self.trace.steps,
        }
        part = path.with_suffix(".part")
        part.write_text(json.dumps(record))
        part.replace(path)


def loop() -> float:
    """Seconds that some Python takes, which is always the same."""
    start = time.perf_counter()
    for _ in range(_LOOP):
        pass
    return time.perf_counter() - start


def operations(*arrays: Any) -> int:
    """Count the operations that arrays, in any nesting, still wait for."""
    pairs: Any = tree_flatten(list(arrays))
    flat = [leaf for _, leaf in pairs if isinstance(leaf, mx.array)]
    text = io.StringIO()
    mx.export_to_dot(text, *flat)
    return text.getvalue().count(_NODE)


def umbel_command(recorder: Recorder) -> Callable[[], None]:
    """Watch umbel's engine; returns its command."""
    from umbel.__main__ import main  # noqa: PLC0415  (only one of the two is there)
    from umbel.scheduler.engine import Engine  # noqa: PLC0415  (same reason)

    last: dict[Engine, tuple[int, int]] = {}

    def held() -> int:
        uses = [engine.statistics().memory for engine in last]
        return sum(use.kv + use.checkpoint + use.tail + use.paging for use in uses)

    def copies() -> int:
        return sum(engine.statistics().memory.paging for engine in last)

    def computed(engine: Engine, _: Any) -> bool:
        now = engine.statistics()
        tokens = now.prefill_tokens, now.generation_tokens
        before = last.get(engine)
        last[engine] = tokens
        return before != tokens

    recorder.held, recorder.copies = held, copies
    recorder.watch(Engine, "step", computed)
    return main


def traced_umbel_command(recorder: Recorder) -> Callable[[], None]:
    """Watch umbel's engine, and time what its steps do; returns its command."""
    recorder.trace = StepTrace()
    return umbel_command(recorder)


def mlx_lm_command(recorder: Recorder) -> Callable[[], None]:
    """Watch the batches and the prompt cache of mlx_lm.server; returns its command.

    Its queue of connections is made longer: of 32 who connect at once the kernel resets some, where
    the server's threads keep Python's lock for seconds, and the run would end there.
    """
    from mlx_lm import server  # noqa: PLC0415  (only one of the two is there)
    from mlx_lm.generate import BatchGenerator  # noqa: PLC0415  (same reason)

    class WatchedCache(server.LRUPromptCache):  # type: ignore[misc]
        """The prompt cache, which says what it holds."""

        def __init__(self, *sizes: Any) -> None:
            super().__init__(*sizes)
            recorder.held = lambda: int(self.nbytes)

    server.LRUPromptCache = WatchedCache
    server.ThreadingHTTPServer.request_queue_size = _CONNECTIONS
    recorder.watch(BatchGenerator, "next", lambda _, responses: any(map(bool, responses)))
    command: Callable[[], None] = server.main
    return command


def main() -> None:
    """Run the server that is named first."""
    _, name, *arguments = sys.argv
    recorder = Recorder()
    commands = {
        "umbel": umbel_command,
        "traced_umbel": traced_umbel_command,
        "mlx_lm": mlx_lm_command,
    }
    command = commands[name](recorder)
    threading.Thread(target=recorder.obey, daemon=True).start()
    sys.argv = [name.removeprefix("traced_"), *arguments]
    command()


if __name__ == "__main__":
    main()
