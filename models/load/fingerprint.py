"""Names a model by what it computes: a hash of its weights, not of its name."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..params import KVQuantization

# Written by tools that move a model about; none of them changes what it computes.
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})


def fingerprint(
    files: Iterable[Path],
    config: Mapping[str, Any],
    dtype: str,
    quantization: KVQuantization | None = None,
) -> str:
    """Hash weight files and the configuration that gives them meaning.

    Args:
        files: the weight files; their order and their folder do not matter, their names do
            (a shard's name says which it is).
        config: the model's configuration.
        dtype: the type the weights were loaded in; state computed in one type is not
            state computed in another.
        quantization: of keys and values, if they are quantised.

    Returns:
        32 hexadecimal digits. Two models share state only where these agree.

    Raises:
        OSError: a file cannot be read.
    """
    ordered = sorted(files, key=lambda path: path.name)
    with ThreadPoolExecutor(max_workers=4) as pool:  # hashing releases the GIL
        digests = list(pool.map(_digest, ordered))
    facts = {
        "weights": [[path.name, digest] for path, digest in zip(ordered, digests, strict=True)],
        "config": {k: v for k, v in config.items() if k not in _VOLATILE},
        "dtype": dtype,
    }
    if quantization is not None:
        facts["kv"] = quantization._asdict()
    canonical = json.dumps(facts, sort_keys=True, default=str).encode()
    return hashlib.sha256(canonical).hexdigest()[:32]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
