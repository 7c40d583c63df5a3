"""`umbel models pull`: downloads a model, and shows how far it is."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

from ...models.load.download import fetch
from ...models.load.hub import is_repo
from ...models.load.watch import Progress, Watch
from ..errors import ClientError, FlagError
from .list import sized

_STEP = 10  # percent between two lines, where there is no terminal


class Pulled(msgspec.Struct, frozen=True):
    """What was downloaded.

    Attributes:
        name: of the repo.
        path: the folder that holds it.
        bytes: of all its files.
    """

    name: str
    path: str
    bytes: int


async def pull(name: str, *, json: bool) -> list[str]:
    """Download a model, or what is missing of it.

    Cancelled, it ends soon, and what has come stays.

    Args:
        name: `org/name`.
        json: the answer is JSON.

    Returns:
        What to print.

    Raises:
        FlagError: it is no name of a repo.
        ClientError: it cannot be had; the message says why.
    """
    if not is_repo(name):
        raise FlagError(f"{name!r} is no Hugging Face repo: they have the form org/name")
    console = Console(stderr=True, highlight=False)
    watch = Watch()
    with _Bar(name, console) as bar:
        watch.report = bar.show
        work = asyncio.ensure_future(asyncio.to_thread(partial(fetch, name, watch)))
        # Takes its error, also where nobody waits for it any more.
        work.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            path = await asyncio.shield(work)
        except asyncio.CancelledError:
            watch.stop.set()
            await asyncio.wait({work})
            console.print(
                f"stopped; `umbel models pull {name}` goes on where it ended", soft_wrap=True
            )
            raise
        except Exception as error:  # in words already
            raise ClientError(str(error)) from error
    return _told(name, path, json=json)


def _told(name: str, path: Path, *, json: bool) -> list[str]:
    size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    if json:
        return [msgspec.json.encode(Pulled(name, str(path), size)).decode()]
    return [f"{name} is here: {sized(size)}, every large file checked; umbel serve --model {name}"]


class _Bar:
    """A progress bar on a terminal, and a line now and then elsewhere."""

    def __init__(self, name: str, console: Console) -> None:
        self._name, self._console = name, console
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bars.add_task(name, total=None, start=False)
        self._percent = -_STEP
        self._begun = False

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def show(self, progress: Progress) -> None:
        """Show how far it is; from any thread."""
        if self._console.is_terminal:
            if not self._begun:
                self._begun = True
                self._bars.start_task(self._task)
            self._bars.update(self._task, completed=progress.done, total=progress.total)
            return
        percent = 100 * progress.done // max(1, progress.total)
        if percent >= self._percent + _STEP:
            self._percent = percent - percent % _STEP
            line = f"{self._name}: {sized(progress.done)} of {sized(progress.total)} ({percent} %)"
            self._console.print(line, markup=False, soft_wrap=True)
