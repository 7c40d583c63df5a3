"""Measurements of a model, kept so that every start on this machine has the same figures.

The memory of computing varies from start to start: it depends on how far launching is ahead of
computing, which decides when buffers are free. The admission of requests must not vary with it. So
a model is measured once, and the figures are kept in a file that no later start replaces.
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import structlog

Figures = Mapping[str, float]

log = structlog.get_logger()


def key_of(*parts: Any) -> str:
    """Name what figures depend on: models, versions, and ways of running them."""
    return sha256(json.dumps([repr(part) for part in parts]).encode()).hexdigest()[:32]


def measured_once(
    folder: Path | None, key: str, names: set[str], measure: Callable[[], Figures]
) -> Figures:
    """Return the figures kept under a key; measure and keep them where there are none.

    Where the folder cannot be used, what was measured is returned all the same.

    Args:
        folder: of all such files; made where it is missing. None measures now and keeps nothing.
        key: from `key_of`.
        names: of the figures.
        measure: finite figures, none below 0.
    """
    if folder is None:
        return measure()
    path = folder / f"{key}.json"
    kept = _read(path, names)
    if kept is not None:
        return kept
    figures = measure()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_once(path, names, figures)
    except OSError as error:
        log.warning("measurements cannot be kept", folder=str(folder), reason=str(error))
        return figures
    # Another daemon may have been first; then its figures are everybody's.
    return _read(path, names) or figures


def _write_once(path: Path, names: set[str], figures: Figures) -> None:
    """Write a file as a whole, unless a good one is there, or one that cannot be read now."""
    temporary = path.with_name(f"{path.stem}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_text(json.dumps(dict(figures)))
        try:
            os.link(temporary, path)
        except FileExistsError:
            if _parse(path.read_bytes(), names) is None:
                temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, names: set[str]) -> Figures | None:
    """Read figures; None where there are none, or none that make sense."""
    try:
        return _parse(path.read_bytes(), names)
    except OSError:
        return None


def _parse(text: bytes, names: set[str]) -> Figures | None:
    try:
        figures = json.loads(text)
    except ValueError:
        return None
    if not isinstance(figures, dict) or figures.keys() != names:
        return None
    numbers = [value for value in figures.values() if type(value) in (int, float)]
    good = len(numbers) == len(names) and all(math.isfinite(n) and n >= 0 for n in numbers)
    return figures if good else None
