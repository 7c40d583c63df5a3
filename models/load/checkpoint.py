"""mlx-lm's model of a folder's files, and a hash that names what it computes.

mlx-lm reads each `model*.safetensors` of a folder, whose path it takes for a pattern. So umbel
makes a folder of links to the files that belong together.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import mlx.core as mx
import structlog
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model

from ..errors import ModelLoadError
from ..estimate.config import ModelConfig
from ..estimate.facts import is_further_head
from ..estimate.folder import generation_config, read_object, weight_files
from ..params import KVQuantization

NO_CODE = "umbel runs no code that comes with a model; serve a conversion that needs none"
"""Advice that ends an error."""

# Tools that copy models write these; none of them changes the computation.
_VOLATILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})

_SHOWN = 3  # names in an error

log = structlog.get_logger()

_Weights = Sequence[tuple[str, mx.array]]


def open_checkpoint(directory: Path) -> tuple[Any, dict[str, Any], list[Path]]:
    """Build a model whose weights are read when they are evaluated.

    Returns the model, its configuration as mlx-lm completes it, and the files of its weights.

    Raises:
        ModelNotFoundError: the folder holds no configuration, or no weights.
        ModelLoadError: the model needs Python code of its own.
        Exception: any error of mlx-lm's for a bad file.
    """
    if code := ModelConfig.read(directory).words("model_file"):
        raise ModelLoadError(f"its classes are in {code}, and {NO_CODE}")
    files = weight_files(directory)
    with TemporaryDirectory(prefix="umbel-") as private:
        links, names = Path(private), dict[Path, Path]()
        for number, file in enumerate(files):
            link = links / f"model-{number:05}.safetensors"
            link.symlink_to(file.resolve())
            names[link] = file
        (links / "generation_config.json").write_text(json.dumps(generation_config(directory)))
        for name in ("config.json", "hf_quant_config.json"):
            if (directory / name).exists():
                (links / name).write_text(json.dumps(read_object(directory / name)))
        try:
            model, config = load_model(links, lazy=True, get_model_classes=_classes)
        except Exception as error:
            message = str(error)
            for link, file in (names | {links: directory}).items():
                message = message.replace(str(link), str(file))
            raise ValueError(message) from error
    return model, config, files


def _classes(config: dict[str, Any]) -> tuple[Callable[[Any], Any], Any]:
    model_class, args_class = _get_classes(config)
    return partial(_build, model_class, ModelConfig(config)), args_class


def _build(model_class: Any, config: ModelConfig, args: Any) -> Any:
    """Build a model that checks the names of its weights before it takes them."""
    model = model_class(args)
    load_weights = model.load_weights

    def load_known(weights: _Weights, *, strict: bool) -> Any:
        del model.load_weights
        return load_weights(_known(weights, model, config), strict=strict)

    model.load_weights = load_known
    return model


def _known(weights: _Weights, model: Any, config: ModelConfig) -> _Weights:
    """Drop surplus heads that predict further tokens; raise ValueError for other differences."""
    named = cast("_Weights", tree_flatten(model.parameters()))
    known = {name for name, _ in named}
    spare = [name for name, _ in weights if name not in known]
    if strange := [name for name in spare if not is_further_head(name, config)]:
        raise ValueError(f"mlx-lm's {config.type} has no {_counted(strange)}")
    if missing := sorted(known - {name for name, _ in weights}):
        raise ValueError(f"mlx-lm's {config.type} lacks {_counted(missing)}")
    if spare:
        log.info("heads that predict further tokens are left out", weights=len(spare))
    return [each for each in weights if each[0] in known]


def _counted(names: Sequence[str]) -> str:
    if len(names) <= _SHOWN:
        return f"weights of these names: {', '.join(names)}"
    return f"{len(names)} weights: {', '.join(names[:_SHOWN])} …"


def fingerprint(
    files: Iterable[Path],
    config: Mapping[str, Any],
    dtype: str,
    quantization: KVQuantization | None = None,
) -> str:
    """Hash weight files, by name and content, and the configuration that gives them meaning.

    `dtype` is the type in which weights were loaded, `quantization` that of keys and values. Two
    models share state only if their hashes (32 hexadecimal digits) agree. Raises OSError.
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
