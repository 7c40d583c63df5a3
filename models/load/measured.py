"""Measurements of a model, kept so that each start on this machine has the same figures.

Peaks of memory vary from start to start, with how far launching is ahead of computing, but the
admission of requests must not. So a model is measured once; no later start replaces its file.
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
    """Hash the facts on which figures depend: models, versions, ways of running."""
    return sha256(json.dumps([repr(part) for part in parts]).encode()).hexdigest()[:32]


def measured_once(
    folder: Path | None, key: str, names: set[str], measure: Callable[[], Figures]
) -> Figures:
    """Return the figures kept under a key; if there are none, measure and keep them.

    `measure` returns finite figures of these names, none below 0. They are returned even if the
    folder cannot be used; without a folder they are not kept.
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
    # If another daemon was first, its figures count.
    return _read(path, names) or figures


def _write_once(path: Path, names: set[str], figures: Figures) -> None:
    """Write a whole file, unless a good or currently unreadable one is there."""
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
