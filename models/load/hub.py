"""Files of a Hugging Face repo, copies on this machine, and errors in words."""

import errno
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # documented as being here

from ..errors import DownloadError

_WEIGHTS = "model*.safetensors"
FILES = ("*.json", _WEIGHTS, "*.model", "*.tiktoken", "*.txt", "*.jinja")
"""Files of a repo that umbel takes. No *.py: it never runs code that comes with a model."""

_REPO = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+(?:/[\w.-]+)*))?")
_ASK = 10.0  # seconds for an answer about a repo
_MOST_PER_FILE = constants.MAX_HTTP_DOWNLOAD_SIZE


class RemoteFile(NamedTuple):
    """A file of a repo."""

    name: str
    size: int  # bytes
    sha256: str  # of a file in the large storage; empty for others

    @property
    def is_resumable(self) -> bool:
        """True if it can be fetched from any byte on, and checked."""
        return bool(self.sha256) and self.size <= _MOST_PER_FILE


class Listing(NamedTuple):
    """Files of a repo at one revision."""

    commit: str
    files: Sequence[RemoteFile]


class _Silent(tqdm):
    """An invisible progress bar."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]


def is_repo(name: str) -> bool:
    """True if a name has the form `org/name` or `org/name@revision`."""
    return _REPO.fullmatch(name) is not None


def repo_of(name: str) -> tuple[str, str | None]:
    """Split a name into the repo and its revision (branch, tag or commit), if it has one."""
    found = _REPO.fullmatch(name)
    return (found[1], found[2]) if found else (name, None)


def list_files(name: str) -> Listing:
    """List the files of a repo that umbel uses; if no weights have usual names, all weights.

    Raises:
        Exception: any error of the library's; see `in_words` and `is_offline`.
    """
    repo, revision = repo_of(name)
    info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_ASK)
    files = [
        RemoteFile(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else "")
        for each in info.siblings or []
    ]
    usual = any(fnmatch(file.name, _WEIGHTS) for file in files)
    patterns = FILES if usual else (*FILES, "*.safetensors")
    taken = [file for file in files if any(fnmatch(file.name, each) for each in patterns)]
    return Listing(info.sha or "", taken)


def is_here(name: str, file: RemoteFile, commit: str) -> bool:
    """True if a file is in the cache."""
    found = try_to_load_from_cache(repo_of(name)[0], file.name, revision=commit)
    return isinstance(found, str)


def blobs(name: str) -> Path:
    """Return the cache's folder of a repo's contents; large files are named by their SHA-256."""
    return _cache() / _folder(name) / "blobs"


def lock(name: str, sha256: str) -> Path:
    """Return the path of the lock that the library also holds while it fetches a large file."""
    folder = _cache() / ".locks" / _folder(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{sha256}.lock"


def _cache() -> Path:
    return Path(constants.HF_HUB_CACHE).expanduser()


def _folder(name: str) -> str:
    return str(repo_folder_name(repo_id=repo_of(name)[0], repo_type="model"))


def link(name: str, files: Sequence[str]) -> Path:
    """Link files into the folder of the repo's files; fetch those that are not cached."""
    return _snapshot(name, files, tqdm_class=_Silent)


def cached(name: str) -> Path:
    """Find the folder of a complete model without the network; raise if it is not complete."""
    return _snapshot(name, FILES, local_files_only=True)


def _snapshot(name: str, patterns: Sequence[str], **how: Any) -> Path:
    repo, revision = repo_of(name)
    return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns), **how))


def is_offline(error: Exception) -> bool:
    """True if an error means that the hub was not reached or failed itself."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500  # noqa: PLR2004  (the server's own faults)
    return isinstance(error, OfflineModeIsEnabled) or _is_transport(error)


def _is_transport(error: Exception) -> bool:
    """True if the HTTP client raised it; the library's version determines the client."""
    return any(base.__name__ in ("TransportError", "ConnectionError") for base in type(error).mro())


def in_words(name: str, error: Exception) -> DownloadError:
    """Explain why a model is not available, and what to do."""
    if isinstance(error, DownloadError):
        return error
    page = f"{constants.ENDPOINT}/{repo_of(name)[0]}"
    key = "run `hf auth login`, or set HF_TOKEN"
    if isinstance(error, GatedRepoError):
        return DownloadError(f"{name} is gated: accept its terms at {page}, then {key}")
    if isinstance(error, RepositoryNotFoundError):
        words = f"Hugging Face has no model {name}, or it is private: look at {page}"
        return DownloadError(f"{words}; for a private one {key}")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return no_space(name)
    unreached = OfflineModeIsEnabled, LocalEntryNotFoundError
    if isinstance(error, unreached) or _is_transport(error):
        return DownloadError(
            f"{name} is not on this machine, or not wholly, and {constants.ENDPOINT} cannot be "
            "reached: check the network, the proxy (HTTPS_PROXY) and HF_HUB_OFFLINE, and try "
            "again; what has arrived is kept"
        )
    return DownloadError(f"cannot get {name!r} from Hugging Face: {error}")


def no_space(name: str, needed: int | None = None, free: int | None = None) -> DownloadError:
    """Explain that the disk is too small."""
    how = "" if needed is None else f": it needs {needed} bytes more, and {free} are free"
    return DownloadError(
        f"no space for {name} in {constants.HF_HUB_CACHE}{how}; free some, or set HF_HOME to a "
        "folder on a larger disk"
    )
