"""What a daemon does until it serves, in words and bars for people."""

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from .console import spinner
from .sizes import amount

DOWNLOADING = "downloading"
REFRESH = 8
"""Times a second that what moves is drawn."""

_WORDS = {
    DOWNLOADING: "downloading the model",
    "loading": "loading the model",
    "measuring": "measuring the model",
    "warming up": "warming up",
    "opening the disk tier": "recovering state from disk",
}


def in_words(phase: str) -> str:
    """Say what a phase of start-up does; one that is not known here says so itself."""
    return _WORDS.get(phase, phase)


def bars(console: Console) -> Progress:
    """Make what shows a phase: a spinner, its name, and a bar where it can be measured."""
    return Progress(
        SpinnerColumn(spinner(console)),
        TextColumn("{task.description}"),
        _Bar(),
        _Amount(),
        _Seconds(),
        console=console,
        transient=True,
        refresh_per_second=REFRESH,
    )


class _Bar(ProgressColumn):
    """A bar, for a phase that can be measured."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = BarColumn(bar_width=30)

    def render(self, task: Task) -> RenderableType:
        """Draw it."""
        return Text() if task.total is None else self._bar.render(task)


class _Amount(ProgressColumn):
    """How much of how much is done."""

    def render(self, task: Task) -> Text:
        """Write it: bytes of what is downloaded, in steps otherwise."""
        if task.total is None:
            return Text()
        if task.description.startswith(in_words(DOWNLOADING)):  # "…, then stopping"
            return Text(f"{amount(task.completed)} of {amount(task.total)}")
        return Text(f"{task.completed:.0f} of {task.total:.0f}")


class _Seconds(ProgressColumn):
    """Seconds since the phase began."""

    def render(self, task: Task) -> Text:
        """Write them."""
        return Text(f"{task.elapsed or 0.0:.0f} s", "dim")
