"""`umbel serve` on a terminal: the phases of start-up, the banner, and what the end waits for."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.spinner import Spinner
from rich.text import Text

from ..lifecycle.display import Display, Served
from .banner import banner
from .console import moves, spinner
from .phases import REFRESH, bars, in_words

if TYPE_CHECKING:
    from ..models.assembly import Phase

_WIPE = (ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class TerminalDisplay(Display):
    """Shows a daemon's life on a terminal.

    Log lines go through the same console, which writes them above whatever moves. A terminal
    that cannot move its cursor (TERM=dumb) gets lines only.

    Args:
        console: of the terminal.
        clock: seconds, monotonic.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._lock = threading.Lock()
        self._moves = moves(console)
        self._progress = bars(console)
        self._phase: Phase | None = None
        self._began = 0.0
        self._closed = False

    def begin(self, phase: "Phase") -> None:
        """Show what start-up does next, and what it has done."""
        with self._lock:
            if self._closed:
                return
            self._end_phase()
            self._phase, self._began = phase, self._clock()
            if self._moves:
                self._progress.add_task(in_words(phase), total=None)
                self._progress.start()
            else:
                self._console.print(f"{in_words(phase)} …")

    def advance(self, done: int, total: int) -> None:
        """Move the bar."""
        with self._lock:
            for task in self._progress.task_ids:
                self._progress.update(task, completed=done, total=total)

    def stop(self) -> None:
        """Say beside the phase that nothing follows it."""
        with self._lock:
            if self._moves:  # the terminal has written ^C, and the line goes on behind it
                self._console.control(Control(*_WIPE))
            elif self._phase is not None:
                self._console.print("stopping after that")
            for task in self._progress.task_ids:
                words = f"{in_words(self._phase or '')}, then stopping"
                self._progress.update(task, description=words)

    def served(self, served: Served) -> None:
        """Print the banner."""
        with self._lock:
            self._end_phase()
        self.close()
        for line in banner(served):
            self._console.print(line)

    @contextmanager
    def waiting(self, text: Callable[[], str]) -> Iterator[None]:
        """Show what the end waits for, with a spinner."""
        if not text():
            yield
            return
        if not self._moves:
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
        """Take the spinner away."""
        with self._lock:
            self._closed = True
            self._progress.stop()

    def _end_phase(self) -> None:
        if self._phase is None:
            return
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        seconds = self._clock() - self._began
        mark = "*" if self._console.options.ascii_only else "✓"
        self._console.print(
            Text.assemble(
                (f"{mark} ", "green"), in_words(self._phase), (f"  {seconds:.1f} s", "dim")
            )
        )
        self._phase = None
