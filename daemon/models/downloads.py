"""`umbel models pull` and `rm`: downloads of models, with their progress, and their removal."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from huggingface_hub import CacheNotFound, scan_cache_dir
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

from ...models.load import embedded_file
from ...models.load.download import fetch
from ...models.load.hub import is_repo
from ...models.load.watch import Progress, Watch
from ..errors import ClientError, FlagError
from ..quoting import amount

_STEP = 10  # percent between two lines, without a terminal


async def pull(name: str, *, json: bool) -> str:
    """Download a model, or the missing rest of it.

    Cancelled, it ends soon and keeps the bytes that have come.

    Args:
        name: `org/name`.
        json: answer in JSON.

    Returns:
        A line to print.

    Raises:
        FlagError: it is no name of a repo.
        ClientError: it cannot be downloaded; the message has the reason.
    """
    if not is_repo(name):
        raise FlagError(f"{name!r} is no Hugging Face repo: they have the form org/name")
    console = Console(stderr=True, highlight=False)
    watch = Watch()
    with _progress(name, console) as watch.report:
        work = asyncio.ensure_future(asyncio.to_thread(partial(fetch, name, watch)))
        # Takes its error, also after a cancellation.
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
    size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    if json:
        return msgspec.json.encode({"name": name, "path": str(path), "bytes": size}).decode()
    return f"{name} is here: {amount(size)}, every large file checked; umbel serve --model {name}"


@contextmanager
def _progress(name: str, console: Console) -> Iterator[Callable[[Progress], None]]:
    """Show a bar on a terminal, otherwise lines; it may be called from any thread."""
    if not console.is_terminal:
        shown = -_STEP

        def print_step(progress: Progress) -> None:
            nonlocal shown
            percent = 100 * progress.done // max(1, progress.total)
            if percent >= shown + _STEP:
                shown = percent - percent % _STEP
                done, total = amount(progress.done), amount(progress.total)
                line = f"{name}: {done} of {total} ({percent} %)"
                console.print(line, markup=False, soft_wrap=True)

        yield print_step
        return
    columns = (DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    bars = Bars(TextColumn("{task.description}"), BarColumn(), *columns, console=console)
    task = bars.add_task(name, total=None, start=False)

    def move(progress: Progress) -> None:
        if not bars.tasks[0].started:
            bars.start_task(task)
        bars.update(task, completed=progress.done, total=progress.total)

    with bars:
        yield move


def remove(name: str) -> str:
    """Delete a model from Hugging Face's cache, or the embedded model that was fetched.

    Args:
        name: `org/name`, of which all revisions are deleted, or the embedded model's.

    Returns:
        A line about the deleted files.

    Raises:
        ClientError: it is not here, or cannot be deleted.
    """
    path = embedded_file.fetched_path() if name == embedded_file.NAME else _repo(name)
    if path is None or not path.exists():
        raise ClientError(f"there is no downloaded model {name}; umbel models list has them")
    files = [path] if path.is_file() else path.rglob("*")
    # A snapshot has links to files, which would count twice.
    own = [each for each in files if each.is_file() and not each.is_symlink()]
    size = sum(each.stat().st_size for each in own)
    try:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    except OSError as error:
        raise ClientError(f"cannot delete {error.filename or path}: {error.strerror}") from error
    return f"deleted {name}: {amount(size)} in {path}"


def _repo(name: str) -> Path | None:
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return None
    return next((r.repo_path for r in repos if (r.repo_type, r.repo_id) == ("model", name)), None)
