"""Downloads of a model from Hugging Face into its cache, which continue where they ended.

`huggingface_hub` deletes a partial file when its process ends, and checks only its size. So umbel
fetches large files itself: each grows beside the place where the library looks for it, is continued
where it ended, is checked by its SHA-256, and is moved there. The library does the rest.
"""

import hashlib
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented as being here
    build_hf_headers,
    hf_raise_for_status,
)

from ..errors import DownloadError, DownloadStoppedError
from . import hub
from .hub import Listing, RemoteFile
from .watch import Progress, Watch

_AT_ONCE = 4  # files
_SILENCE = 10.0  # seconds without a byte before another connection is tried
_PAUSE = 1.0  # seconds until then
_POLL = 0.5  # seconds between checks of a file that another process fetches
_OFTEN = 0.2  # seconds between progress reports
_AGAIN = frozenset({408, 429, 500, 502, 503, 504})
_PARTIAL = 206
_PIECE = 1 << 20  # bytes that are hashed at a time


def fetch(name: str, watch: Watch, begin: Callable[[], object] = lambda: None) -> Path:
    """Return the folder of a repo's files; missing ones are fetched, after a call of `begin`.

    `name` is `org/name` or `org/name@revision`. Without a network, a complete copy is used.

    Raises:
        DownloadError: the files are not available, the download was stopped, or it stalls.
    """
    try:
        try:
            listing = hub.list_files(name)
        except Exception as error:
            if not hub.is_offline(error):
                raise
            return _without_network(name, error)
        missing = [file for file in listing.files if not hub.is_here(name, file, listing.commit)]
        if missing:
            begin()
            # Small files first: they identify a partial model, so that it can be listed.
            if small := [file.name for file in missing if not file.sha256]:
                hub.link(name, small)
            _Download(name, listing, missing, watch).run()
        folder = hub.link(name, [file.name for file in listing.files])
        if folder.name != listing.commit:
            raise DownloadError(  # noqa: TRY301
                f"{name} changed while it was downloaded: start again, or name a revision"
            )
    except Exception as error:  # of the library, the HTTP client or the file system
        raise hub.in_words(name, error) from error
    if missing:
        total = sum(file.size for file in listing.files)
        watch.report(Progress(total, total))
    return folder


def _without_network(name: str, reason: Exception) -> Path:
    try:
        return hub.cached(name)
    except OSError:
        raise reason from None


class _Download:
    def __init__(
        self, name: str, listing: Listing, missing: Sequence[RemoteFile], watch: Watch
    ) -> None:
        self._name = name
        self._commit = listing.commit
        self._folder = hub.blobs(name)
        self._missing = missing
        self._watch = watch
        self._lock = threading.Lock()
        self._ended = threading.Event()  # a thread has failed; the others end
        self._total = sum(file.size for file in listing.files)
        self._done = self._total - sum(file.size for file in missing)
        self._arrived = time.monotonic()
        self._failure: Exception | None = None

    def run(self) -> None:
        """Fetch all resumable files.

        If it fails, threads that wait for a connection are left behind. They end with it or the
        process, and hold nothing that is not on disk.
        """
        large = deque(file for file in self._missing if file.is_resumable)
        for file in large:
            self._done += _size(self._beside(file))
        self._require_space()
        threads = [
            threading.Thread(target=self._work, args=(large,), name="download", daemon=True)
            for _ in range(min(_AT_ONCE, len(large)))
        ]
        for thread in threads:
            thread.start()
        try:
            self._look_after(threads)
        finally:
            self._ended.set()

    def _look_after(self, threads: Sequence[threading.Thread]) -> None:
        """Report progress until the threads have ended; raise the first failure."""
        reported = -1
        while True:
            running = any(thread.is_alive() for thread in threads)
            if self._done != reported:
                reported = self._done
                self._watch.report(Progress(reported, self._total))
            if self._failure is not None:
                raise self._failure
            if not running:
                return
            self._require_progress()
            self._watch.stop.wait(_OFTEN)

    def _work(self, files: deque[RemoteFile]) -> None:
        while not self._ended.is_set():
            try:
                file = files.popleft()
            except IndexError:
                return
            try:
                self._fetch(file)
            except Exception as error:  # noqa: BLE001  (who looks after the threads raises it)
                self._failure = self._failure or error
                return

    def _beside(self, file: RemoteFile) -> Path:
        return self._folder / f"{file.sha256}.partial"

    def _require_space(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        needed, free = self._total - self._done, shutil.disk_usage(self._folder).free
        if needed > free:
            raise hub.no_space(self._name, needed, free)

    def _fetch(self, file: RemoteFile) -> None:
        blob, partial = self._folder / file.sha256, self._beside(file)
        with self._alone(file, partial):
            if blob.exists():  # another process has just fetched it
                partial.unlink(missing_ok=True)
                return
            with partial.open("ab+", buffering=0) as content:
                while (here := content.tell()) < file.size:
                    self._continue(file, content, here)
                digest = self._digest(content)
            if digest != file.sha256:
                partial.unlink()
                raise DownloadError(
                    f"{file.name} of {self._name} arrived damaged, and is removed: try again"
                )
            partial.replace(blob)

    @contextmanager
    def _alone(self, file: RemoteFile, partial: Path) -> Iterator[None]:
        """Hold a file's lock; while another process has it, count the bytes that it adds."""
        lock, seen = FileLock(hub.lock(self._name, file.sha256)), _size(partial)
        while not lock.is_locked:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                if (now := _size(partial)) > seen:
                    self._advance(now - seen)
                    seen = now
                self._require_progress()
                self._ended.wait(_POLL)
        try:
            yield
        finally:
            lock.release()

    def _continue(self, file: RemoteFile, content: FileIO, here: int) -> None:
        """Receive from one connection; wait after errors that may pass."""
        try:
            self._receive(file, content, here)
        except HfHubHTTPError as error:
            if error.response.status_code not in _AGAIN:
                raise
        except (DownloadError, OSError):
            raise
        except Exception as error:
            if not hub.is_offline(error):
                raise
        else:
            if content.tell() > here:
                return
        self._require_progress()
        self._ended.wait(_PAUSE)

    def _receive(self, file: RemoteFile, content: FileIO, here: int) -> None:
        url = hf_hub_url(hub.repo_of(self._name)[0], file.name, revision=self._commit)
        headers = build_hf_headers() | {"Range": f"bytes={here}-", "Accept-Encoding": "identity"}
        silence = min(_SILENCE, self._watch.stalled_after)
        with get_session().stream("GET", url, headers=headers, timeout=silence) as response:
            hf_raise_for_status(response)
            if here and response.status_code != _PARTIAL:  # it starts at 0
                content.truncate(0)
                content.seek(0)
                self._advance(-here)
            for part in response.iter_bytes():
                content.write(part)
                self._advance(len(part))
                self._require_progress()

    def _digest(self, content: FileIO) -> str:
        """Hash a file; the time that this takes is no stall."""
        digest = hashlib.sha256()
        content.seek(0)
        while piece := content.read(_PIECE):
            digest.update(piece)
            self._advance(0)
        return digest.hexdigest()

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._arrived = time.monotonic()

    def _require_progress(self) -> None:
        if self._watch.stop.is_set() or self._ended.is_set():
            raise DownloadStoppedError(
                f"the download of {self._name} was stopped; it goes on where it ended"
            )
        silence = time.monotonic() - self._arrived
        if silence > self._watch.stalled_after:
            raise DownloadError(
                f"the download of {self._name} stalls: nothing has arrived for {silence:.0f} "
                "seconds; check the network and start again: it goes on where it ended"
            )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
