"""A name to a model that can run: the embedded one, a directory, or a Hugging Face repo."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from .device import DevicePolicy, device_policy

import mlx.core as mx  # isort: skip  (after device, which chooses the BLAS first)
from . import open_files  # noqa: F401  # isort: skip  (the first import of mlx_lm)
from huggingface_hub import snapshot_download, try_to_load_from_cache
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from ..errors import ModelLoadError, ModelNotFoundError, UnsupportedCacheError
from ..kv.layout import CacheLayout
from ..params import KVQuantization
from ..text.codec import TextCodec
from . import embedded
from .fingerprint import fingerprint

LoadPhase = Literal["downloading", "loading"]
"""What is done to load a model."""

_REPO = re.compile(r"[\w.-]+/[\w.-]+")
# No *.py: umbel never runs code that comes with a model.
_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# What a recurrent model without positions is held to: it has no limit of its own, but
# a request must have one.
_UNBOUNDED_CONTEXT = 1_048_576


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. Its arrays belong to the thread that loaded it.

    Attributes:
        name: what clients call it.
        model: mlx-lm's module, evaluated.
        text: its tokenizer and chat template.
        layout: what its layers keep of the tokens they have seen.
        fingerprint: see `fingerprint.fingerprint`.
        context_length: the most tokens of prompt and answer together.
        weight_bytes: what the weights take in memory.
        device: how it is run.
    """

    name: str
    model: Any
    text: TextCodec
    layout: CacheLayout
    fingerprint: str
    context_length: int
    weight_bytes: int
    device: DevicePolicy


def load(
    name: str,
    quantization: KVQuantization | None = None,
    begin: Callable[[LoadPhase], object] = lambda _: None,
) -> LoadedModel:
    """Load a model on the calling thread and evaluate its weights.

    On a CPU the weights are dequantised to fp32: MLX has no other fast type there.

    Args:
        name: `smollm2` (embedded), a directory, or a Hugging Face repo `org/name`.
        quantization: of keys and values, if they are to be quantised.
        begin: told what is done next.

    Raises:
        ModelNotFoundError: the name leads to no model.
        ModelLoadError: what is there cannot be loaded.
        UnsupportedCacheError: its layers keep state that cannot be saved, or not be quantised.
    """
    device = device_policy()
    if name == embedded.NAME:
        begin("loading")
        model, tokenizer, config, path = embedded.load(mx.float32 if device.fp32 else mx.bfloat16)
        files = [path]
        mx.eval(model.parameters())
    else:
        directory = _directory(name, begin)
        begin("loading")
        model, tokenizer, config = _load_directory(directory, fp32=device.fp32)
        files = sorted(directory.glob("model*.safetensors"))
    text = TextCodec(tokenizer)
    _ = text.template.abilities  # found by rendering: not at the first request
    named = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    leaves = [leaf for _, leaf in named]
    dtypes = ",".join(sorted({str(leaf.dtype) for leaf in leaves}))
    layout = CacheLayout(model, quantization)
    if quantization is not None:
        _try_quantized(model, layout)
    return LoadedModel(
        name=_public_name(name),
        model=model,
        text=text,
        layout=layout,
        fingerprint=fingerprint(files, config, dtypes, quantization),
        context_length=_context_length(config),
        weight_bytes=sum(leaf.nbytes for leaf in leaves),
        device=device,
    )


def _try_quantized(model: Any, layout: CacheLayout) -> None:
    """Fail now if the model's attention cannot read quantised keys and values."""
    cache = layout.open()
    try:
        for tokens in ([1, 2], [3]):
            mx.eval(model(mx.array([tokens]), cache=cache.layers))
    except Exception as error:  # whatever a model makes of triples where it expects arrays
        raise UnsupportedCacheError(
            f"the model cannot attend to quantised keys and values ({error}): serve it without "
            "kv_bits"
        ) from error


def _public_name(name: str) -> str:
    """A directory is known by its last part, so that answers do not tell where it lies."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def _directory(name: str, begin: Callable[[LoadPhase], object]) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if not _REPO.fullmatch(name):
        raise ModelNotFoundError(
            f"no model {name!r}: it is not the embedded {embedded.NAME!r}, "
            "not a directory, and not a Hugging Face repo of the form org/name"
        )
    if try_to_load_from_cache(name, "config.json") is None:
        begin("downloading")
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # its own errors, the HTTP client's, the file system's
        raise ModelNotFoundError(f"cannot get {name!r} from Hugging Face: {error}") from error


def _load_directory(directory: Path, *, fp32: bool) -> tuple[Any, Any, dict[str, Any]]:
    try:
        model, config = load_model(directory, lazy=True)
        # Said aloud, because transformers would ask on the terminal otherwise.
        tokenizer = load_tokenizer(
            directory, {"trust_remote_code": False}, eos_token_ids=config.get("eos_token_id")
        )
        if fp32:
            model = dequantize_model(model)
            model.set_dtype(mx.float32)
        mx.eval(model.parameters())  # here: what fails on reading fails now
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{directory} holds no mlx-lm model: {error}") from error
    except Exception as error:  # mlx-lm and transformers raise whatever a bad file leads to
        raise ModelLoadError(f"cannot load {directory}: {error}") from error
    return model, tokenizer, config


def _context_length(config: Mapping[str, Any]) -> int:
    for part in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if part.get(key):
                return int(part[key])
    return _UNBOUNDED_CONTEXT
