"""Start-up on a terminal: phases with bars, the banner, and what a stop waits for."""

import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.segment import ControlType
from rich.spinner import Spinner
from rich.text import Text

from ... import __version__
from ..lifecycle.display import Display, Served
from ..quoting import amount
from .console import moves, spinner

if TYPE_CHECKING:
    from ..models.assembly import Phase

REFRESH = 8
"""Redraws a second of what moves."""

_DOWNLOADING = "downloading"
_PHASES = {
    _DOWNLOADING: "downloading the model",
    "loading": "loading the model",
    "measuring": "measuring the model",
    "warming up": "warming up",
    "opening the disk tier": "recovering state from disk",
}
_WIPE = (ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
_NAMES_WIDTH = 11  # of the banner's column of names
_BODY = """{"temperature": 0,
  "messages": [{"role": "user", "content": "What is the capital of France?"}]}"""


def phase_words(phase: str) -> str:
    """Describe a phase of start-up; an unknown one by its name."""
    return _PHASES.get(phase, phase)


class _Bar(ProgressColumn):
    """A bar, for a phase that can be measured."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = BarColumn(bar_width=30)

    def render(self, task: Task) -> RenderableType:
        return Text() if task.total is None else self._bar.render(task)


class _Amount(ProgressColumn):
    """Bytes of a download, steps of another phase: done and in all."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        if task.description.startswith(_PHASES[_DOWNLOADING]):  # "…, then stopping"
            return Text(f"{amount(task.completed)} of {amount(task.total)}")
        return Text(f"{task.completed:.0f} of {task.total:.0f}")


class _Seconds(ProgressColumn):
    """Seconds since the phase began."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.elapsed or 0.0:.0f} s", "dim")


class _Phases:
    """Shows one phase at a time: a spinner, its words, and a bar if it can be measured."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(spinner(console)),
            TextColumn("{task.description}"),
            _Bar(),
            _Amount(),
            _Seconds(),
            console=console,
            transient=True,
            refresh_per_second=REFRESH,
        )

    def begin(self, words: str) -> None:
        self.end()
        self._progress.add_task(words, total=None)
        self._progress.start()

    def update(self, **fields: Any) -> None:
        for task in self._progress.task_ids:
            self._progress.update(task, **fields)

    def end(self) -> None:
        for task in self._progress.task_ids:
            self._progress.remove_task(task)

    def close(self) -> None:
        self._progress.stop()


class StartView:
    """Shows a daemon's start to its client, from the answers of `/ready`.

    A terminal that cannot redraw lines gets one line for each phase.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phases = _Phases(console) if moves(console) else None
        self._phase: str | None = None
        if self._phases is not None:
            self._phases.begin("starting")  # until there is an answer

    def show(self, ready: dict[str, Any]) -> None:
        """Show one answer of `/ready`."""
        phase = ready.get("phase")
        if phase is not None and phase != self._phase:
            self._phase = phase
            if self._phases is None:
                self._console.print(f"the daemon is {phase_words(phase)} …", style="dim")
            else:
                self._phases.begin(phase_words(phase))
        if self._phases is not None and (progress := ready.get("download")) is not None:
            self._phases.update(completed=progress["done"], total=progress["total"])

    def close(self) -> None:
        """Remove the spinner."""
        if self._phases is not None:
            self._phases.close()


class TerminalDisplay(Display):
    """Shows a daemon's life on a terminal.

    Log lines go through the same console, which writes them above whatever moves. A terminal
    that cannot redraw lines (TERM=dumb) gets lines only.

    Args:
        console: of the terminal.
        clock: seconds, monotonic.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._lock = threading.Lock()
        self._moves = moves(console)
        self._phases = _Phases(console)
        self._phase: Phase | None = None
        self._began = 0.0
        self._closed = False

    def begin(self, phase: "Phase") -> None:
        """Tick the last phase off, and show the next one."""
        with self._lock:
            if self._closed:
                return
            self._end_phase()
            self._phase, self._began = phase, self._clock()
            if self._moves:
                self._phases.begin(phase_words(phase))
            else:
                self._console.print(f"{phase_words(phase)} …")

    def advance(self, done: int, total: int) -> None:
        """Move the bar."""
        with self._lock:
            self._phases.update(completed=done, total=total)

    def stop(self) -> None:
        """Say beside the phase that the daemon stops after it."""
        with self._lock:
            if self._moves:  # the terminal has written ^C at the end of the line
                self._console.control(Control(*_WIPE))
            elif self._phase is not None:
                self._console.print("stopping after that")
            self._phases.update(description=f"{phase_words(self._phase or '')}, then stopping")

    def served(self, served: Served) -> None:
        """Print the banner."""
        with self._lock:
            self._end_phase()
        self.close()
        for line in _banner(served):
            self._console.print(line)

    @contextmanager
    def waiting(self, text: Callable[[], str]) -> Iterator[None]:
        """Show what the end waits for, with a spinner."""
        if not self._moves or not text():
            if text():
                self._console.print(text())
            yield
            return
        turning = Spinner(spinner(self._console))

        def picture() -> Spinner:
            turning.update(text=text())
            return turning

        with Live(
            get_renderable=picture,
            console=self._console,
            refresh_per_second=REFRESH,
            transient=True,
        ):
            yield

    def close(self) -> None:
        """Remove the spinner."""
        with self._lock:
            self._closed = True
            self._phases.close()

    def _end_phase(self) -> None:
        if self._phase is None:
            return
        self._phases.end()
        seconds = self._clock() - self._began
        mark = "*" if self._console.options.ascii_only else "✓"
        words = phase_words(self._phase)
        self._console.print(
            Text.assemble((f"{mark} ", "green"), words, (f"  {seconds:.1f} s", "dim"))
        )
        self._phase = None


def _banner(served: Served) -> Iterator[Text]:
    yield Text()
    yield Text.assemble(("umbel", "bold"), f" {__version__} serves ", (served.model, "bold green"))
    yield Text()
    for name, value in _facts(served):
        yield Text.assemble((f"  {name:{_NAMES_WIDTH}}", "dim"), value)
    yield Text()
    yield Text("Try it:", "dim")
    yield Text()
    yield from (Text(f"  {line}") for line in _curl(served.socket))
    yield Text()
    where = "" if served.default_socket else f" --socket {shlex.quote(str(served.socket))}"
    commands = {f"umbel chat{where}": "talks to it", f"umbel top{where}": "shows it at work"}
    width = max(map(len, commands))
    for command, does in commands.items():
        yield Text.assemble((f"  {command:{width}}", "bold"), (f"  {does}", "dim"))
    yield Text()
    yield Text("Ctrl-C stops it.", "dim")
    yield Text()


def _curl(socket: Path) -> list[str]:
    """Write a request to the daemon as a shell's command, in lines that need no folding."""
    parts = (
        ["curl", "--unix-socket", str(socket)],
        ["http://localhost/v1/chat/completions"],
        ["-H", "Content-Type: application/json"],
        ["-d", _BODY],
    )
    return " \\\n  ".join(map(shlex.join, parts)).split("\n")


def _facts(served: Served) -> Iterator[tuple[str, Text]]:
    memory = f"{amount(served.budget)} for state, beside {amount(served.weights)} of weights"
    yield "context", Text(f"{served.context:,} tokens")
    yield "memory", Text(memory)
    if served.one_by_one is None:
        yield "requests", Text(f"up to {served.most} run at once")
    else:
        yield "requests", Text(f"decode one by one: {served.one_by_one}", "yellow")
    yield "socket", Text(str(served.socket))
    key = ", with the key" if served.needs_key else ""
    for address in served.addresses:
        yield "OpenAI", Text(f"http://{address}/v1{key}")
        yield "Anthropic", Text(f"http://{address}{key}")
    yield "state", Text("in memory only" if served.state is None else f"on disk, {served.state}")
