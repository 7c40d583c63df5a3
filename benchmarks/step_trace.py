"""Where the time of umbel's steps goes, and what memory they ask for: `conversations.py --trace`.

    python benchmarks/step_trace.py FILE [SECONDS]

prints what is in a file that `conversations.py --json FILE --trace` wrote: by kind of step how many
there were and the median and the longest of each phase, in milliseconds; then each step that took
longer than so many seconds (0.1).

A phase is a call that `Engine.step` makes, or that such a call makes; the time of a phase holds
that of the phases that it makes. Beside the wall's time a step has the processor time of its
thread: where that is as long, the thread did not wait, for the device, a lock or the interpreter.
A long step tells of each phase how long it waited.
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_PHASES = {
    "page": ("umbel.scheduler.paging", "Paging.step"),
    "start": ("umbel.scheduler.engine", "Engine._start_waiting"),
    "plan": ("umbel.scheduler.engine", "Engine._plan"),
    "decode": ("umbel.scheduler.decoder", "Decoder.run"),
    "moves": ("umbel.models.kv.placement", "Placement.apply"),
    "call": ("umbel.models.kv.placement", "Placement.step"),
    "launch": ("umbel.models.runner", "launch"),
    "read": ("umbel.scheduler.decoder", "Decoder.read"),
    "sample": ("umbel.scheduler.decoder", "Decoder.sample"),
    "keep": ("umbel.scheduler.lifecycle", "Lifecycle.keep"),
    "prefill": ("umbel.scheduler.engine", "Engine._prefill"),
    "model": ("umbel.models.runner", "prefill"),
    "complete": ("umbel.models.runner", "complete"),
}
"""By name: the module, and the function or the class and the method."""

_LONG = 0.1
_WAIT = 5e-3  # seconds of waiting that are printed
_MEMORY = ("budget", "kv", "tail", "paging", "transient")

Step = dict[str, Any]


class StepTrace:
    """Notes what each step does. Made once in a process, before its engine.

    Attributes:
        steps: that computed, since they were last cleared.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._phases: dict[str, float] = defaultdict(float)
        self._cpus: dict[str, float] = defaultdict(float)
        self._asked: Step = {}
        self._began = 0.0
        for name, (module, path) in _PHASES.items():
            *inner, method = path.split(".")
            owner = import_module(module)
            for part in inner:
                owner = getattr(owner, part)
            setattr(owner, method, self._timed(name, getattr(owner, method)))

    def _timed(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def phase(*args: Any, **options: Any) -> Any:
            if name == "prefill":
                self._asked["chunks"] = [args[1].tokens]
            start, cpu = time.perf_counter(), time.thread_time()
            try:
                result = real(*args, **options)
            finally:
                self._phases[name] += time.perf_counter() - start
                self._cpus[name] += time.thread_time() - cpu
            if name == "plan" and result is not None:
                self._asked = _asked(args[0], result.batch)
            return result

        return phase

    def begin(self) -> None:
        """Begin a step."""
        self._phases.clear()
        self._cpus.clear()
        self._asked = {}
        self._began = time.thread_time()

    def end(self, seconds: float) -> None:
        """Note a step that computed, and took so many seconds."""
        times = {"cpu": time.thread_time() - self._began, **self._phases}
        step = {"at": time.time(), "step": seconds, **times, "cpus": dict(self._cpus)}
        self.steps.append(step | self._asked)


def _asked(engine: Any, batch: Any) -> Step:
    memory = engine._memory.use()  # noqa: SLF001  (what is watched has no other door)
    return {
        "rows": 0 if batch.decode is None else len(batch.decode.sequences),
        "chunks": [],
        **{name: getattr(memory, name) for name in _MEMORY},
    }


def kind(step: Step) -> str:
    """Name what a step did."""
    rows, chunks = step.get("rows", 0), step.get("chunks", [])
    parts = ["decode"] * bool(rows) + ["prefill"] * bool(chunks)
    return " and ".join(parts) or "neither"


def summary(steps: list[Step], long: float) -> list[str]:
    """Describe steps in lines."""
    lines = []
    for name in sorted(set(map(kind, steps))):
        of_kind = [step for step in steps if kind(step) == name]
        lines.append(f"{name}: {len(of_kind)} steps, {_sum(of_kind, 'step'):.2f} s")
        for phase in ("step", "cpu", *_PHASES):
            taken = sorted(1e3 * step.get(phase, 0.0) for step in of_kind)
            middle = statistics.median(taken)
            lines.append(
                f"  {phase:8} median {middle:8.2f}  longest {taken[-1]:8.1f}"
                f"  sum {_sum(of_kind, phase):7.2f} s"
            )
    start = steps[0]["at"] if steps else 0.0
    lines += [_line(step, start) for step in steps if step["step"] > long]
    return lines


def _sum(steps: list[Step], phase: str) -> float:
    return float(sum(step.get(phase, 0.0) for step in steps))


def _waited(step: Step, phase: str) -> str:
    """Describe the part of a phase without processor time, if it is long enough."""
    cpu = step.get("cpus", {}).get(phase)
    waited = 0.0 if cpu is None else step[phase] - cpu
    return f" (waited {1e3 * waited:.0f})" if waited > _WAIT else ""


def _line(step: Step, start: float) -> str:
    times = " ".join(
        f"{name} {1e3 * step[name]:.0f}" + _waited(step, name)
        for name in ("cpu", *_PHASES)
        if step.get(name, 0.0) > 1e-3  # noqa: PLR2004  (a millisecond)
    )
    memory = " ".join(f"{name} {step.get(name, 0) / 2**30:.2f}" for name in _MEMORY)
    asked = f"rows {step.get('rows', 0)} chunks {step.get('chunks', [])}"
    return (
        f"{step['at'] - start:7.2f} s: {1e3 * step['step']:.0f} ms, {asked}; {times}; GiB {memory}"
    )


def main() -> None:
    """Print what is in a file."""
    _, path, *rest = sys.argv
    found = json.loads(Path(path).read_text())
    for result in found["results"]:
        if steps := result["record"].get("trace"):
            print(f"{result['name']}, process {result['process']}")
            print("\n".join(summary(steps, float(rest[0]) if rest else _LONG)))


if __name__ == "__main__":
    main()
