"""The start of a daemon as its client sees it, from what `/ready` answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from .console import moves
from .phases import bars, in_words


class StartView:
    """Shows what `/ready` tells, again and again: a spinner and a bar, or a line a phase."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = bars(console) if moves(console) else None
        self._phase: str | None = None
        if self._bars is not None:
            self._begin("starting")  # until there is somebody to ask

    def show(self, ready: dict[str, Any]) -> None:
        """Show one answer of `/ready`."""
        phase = ready.get("phase")
        if phase is not None and phase != self._phase:
            self._phase = phase
            self._begin(in_words(phase))
        if self._bars is not None and (progress := ready.get("download")) is not None:
            for task in self._bars.task_ids:
                self._bars.update(task, completed=progress["done"], total=progress["total"])

    def _begin(self, words: str) -> None:
        if self._bars is None:
            self._console.print(f"the daemon is {words} …", style="dim")
            return
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        self._bars.add_task(words, total=None)
        self._bars.start()

    def close(self) -> None:
        """Take the spinner away."""
        if self._bars is not None:
            self._bars.stop()


@contextmanager
def shown(console: Console) -> Iterator[StartView]:
    """Show a start for as long as a block lasts."""
    view = StartView(console)
    try:
        yield view
    finally:
        view.close()
