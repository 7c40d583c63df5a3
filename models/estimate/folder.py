"""Files of a model's folder that may be read, and how much of them."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ModelLoadError, ModelNotFoundError

INDEX = "model.safetensors.index.json"
"""Names the shards that belong together."""

_MOST_BYTES = 128 << 20  # of a file that is read as a whole; tokenizers have up to 40 MB
_READ_WHOLE = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt"})


def require_regular(directory: Path) -> None:
    """Refuse a folder in which a file is not regular, or is far too long.

    A pipe would block its reader for ever, and a device might have no end.

    Raises:
        ModelLoadError: the folder holds such a file, or cannot be read.
    """
    try:
        entries = list(_entries(directory))
    except OSError as error:
        raise ModelLoadError(f"cannot read {directory}: {error.strerror}") from error
    for path in entries:
        try:
            status = path.stat()
        except OSError:
            continue  # a broken link: its reader raises an error
        if not stat.S_ISDIR(status.st_mode):
            _require_readable(path, status.st_mode, status.st_size)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileNotFoundError: the file is missing.
        ModelLoadError: it cannot be read, or is no object.
    """
    try:
        status = path.stat()
        _require_readable(path, status.st_mode, status.st_size)
        entries = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(str(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(entries, dict):
        raise ModelLoadError(f"cannot read {path}: it is no object")
    return entries


def generation_config(directory: Path) -> dict[str, Any]:
    """Read `generation_config.json`; empty if it is missing or unusable."""
    try:
        return read_object(directory / "generation_config.json")
    except (FileNotFoundError, ModelLoadError):
        return {}


def weight_files(directory: Path) -> list[Path]:
    """List the files of a model's weights, by name.

    The index names the files that belong together; other files are ignored. Without an index they
    are `model.safetensors`, or shards of the form `model*.safetensors`.

    Raises:
        ModelNotFoundError: the folder holds none.
        ModelLoadError: the index cannot be read, or names a missing file.
    """
    try:
        index = read_object(directory / INDEX)
    except FileNotFoundError:
        whole = directory / "model.safetensors"
        files = [whole] if whole.exists() else sorted(directory.glob("model*.safetensors"))
    else:
        files = [directory / name for name in _named(directory, index)]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ModelLoadError(f"{directory} lacks {len(missing)} of its files: {missing[0]} …")
    if not files:
        raise ModelNotFoundError(
            f"{directory} holds no mlx-lm model: it holds no model*.safetensors"
        )
    return files


def _entries(directory: Path) -> Iterator[Path]:
    for folder in (directory, directory / "additional_chat_templates"):
        if folder.is_dir():
            yield from folder.iterdir()


def _require_readable(path: Path, mode: int, nbytes: int) -> None:
    if not stat.S_ISREG(mode):
        raise ModelLoadError(f"cannot read {path}: it is no regular file")
    if path.suffix in _READ_WHOLE and nbytes > _MOST_BYTES:
        raise ModelLoadError(
            f"cannot read {path}: it has {nbytes} bytes, and umbel reads {_MOST_BYTES} at most"
        )


def _named(directory: Path, index: dict[str, Any]) -> list[str]:
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelLoadError(f"cannot read the index of {directory}: it names no files")
    for name in shards.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelLoadError(f"cannot read the index of {directory}: {name!r} is no file name")
    return sorted(set(shards.values()))
