"""`umbel models rm`: deletes a model that was downloaded."""

import shutil
from pathlib import Path

from huggingface_hub import CacheNotFound, scan_cache_dir

from ...models.load import embedded_file
from ..errors import ClientError
from .list import sized


def remove(name: str) -> str:
    """Delete a model from Hugging Face's cache, or the embedded model that was fetched.

    Args:
        name: `org/name`, whose revisions are all deleted, or the embedded model's.

    Returns:
        What was deleted, in words.

    Raises:
        ClientError: it is not here, or cannot be deleted.
    """
    path = embedded_file.fetched_path() if name == embedded_file.NAME else _repo(name)
    if path is None or not path.exists():
        raise ClientError(f"there is no downloaded model {name}; umbel models list has them")
    files = [path] if path.is_file() else [each for each in path.rglob("*") if _is_own(each)]
    size = sum(each.stat().st_size for each in files)
    try:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    except OSError as error:
        raise ClientError(f"cannot delete {error.filename or path}: {error.strerror}") from error
    return f"deleted {name}: {sized(size)} in {path}"


def _is_own(path: Path) -> bool:
    """True of a file: a snapshot has links to files, which would count twice."""
    return path.is_file() and not path.is_symlink()


def _repo(name: str) -> Path | None:
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return None
    return next((r.repo_path for r in repos if (r.repo_type, r.repo_id) == ("model", name)), None)
