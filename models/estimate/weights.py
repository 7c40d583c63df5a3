"""Memory of a model's weights, from the headers of its safetensors files.

A file begins with the length of its header, eight bytes, and the header: JSON that names each
tensor's type, shape and place. https://huggingface.co/docs/safetensors describes it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelLoadError
from .config import ModelConfig
from .folder import weight_files

_LENGTH = 8
_LONGEST = 100 << 20  # bytes of a header; the format's own bound
_GROUP = 64  # numbers that share a scale, where the configuration does not say it
_FP32 = 4
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_QUANTISED = (".scales", ".biases")
# Parts of models for images and sound: mlx-lm drops them.
_LEFT_OUT = frozenset(
    {
        *("vision_tower", "vision_model", "visual", "multi_modal_projector", "mm_projector"),
        *("audio_tower", "embed_vision", "embed_audio"),
    }
)
_FURTHER = re.compile(r"(?:^|\.)(?:mtp|nextn)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Weights(NamedTuple):
    """A model's weights.

    Attributes:
        nbytes: what they take as they are stored.
        fp32: what they take as fp32, dequantised.
        width: bytes of a number that is computed with them.
    """

    nbytes: int
    fp32: int
    width: int


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def weights_of(directory: Path, config: ModelConfig) -> Weights:
    """Read the headers of a model's files.

    Raises:
        ModelLoadError: a file cannot be read, or there is none.
    """
    tensors: dict[str, _Tensor] = {}
    for path in weight_files(directory):
        tensors.update(_header(path))
    tensors = {
        name: each
        for name, each in tensors.items()
        if _LEFT_OUT.isdisjoint(name.split(".")) and not is_further_head(name, config)
    }
    types = Counter[str]()
    for each in tensors.values():
        types[each.dtype] += each.nbytes if each.dtype in _FLOATS else 0
    (floats, _), *_ = types.most_common(1) or [("BF16", 0)]
    return Weights(
        nbytes=sum(each.nbytes for each in tensors.values()),
        fp32=_FP32 * sum(_numbers(tensors, config)),
        width=_FLOATS.get(floats, 2),
    )


def _header(path: Path) -> dict[str, _Tensor]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            if length > _LONGEST:
                raise ValueError(f"its header would have {length} bytes")  # noqa: TRY301
            entries: dict[str, Any] = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            return {name: _tensor(entry) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error


def _tensor(entry: Mapping[str, Any]) -> _Tensor:
    begin, end = entry["data_offsets"]
    return _Tensor(entry["dtype"], tuple(entry["shape"]), int(end) - int(begin))


def is_further_head(name: str, config: ModelConfig) -> bool:
    """Tell whether a weight belongs to a head that predicts further tokens (MTP).

    Checkpoints have such heads under names of their own, or as layers after the last one.
    """
    if _FURTHER.search(name):
        return True
    found = _LAYER.search(name)
    last = config.layer_count + config.number("num_nextn_predict_layers", "num_mtp_layers")
    return found is not None and config.layer_count <= int(found[1]) < last


def _numbers(tensors: Mapping[str, _Tensor], config: ModelConfig) -> Iterator[int]:
    """Count the numbers of each tensor, once it is dequantised."""
    for name, tensor in tensors.items():
        if name.endswith(_QUANTISED):
            continue
        base = name.removesuffix(".weight")
        scales = tensors.get(f"{base}.scales")
        yield prod(tensor.shape if scales is None else scales.shape) * (
            1 if scales is None else _group_size(base, config)
        )


def _group_size(base: str, config: ModelConfig) -> int:
    how = config.part("quantization") or config.part("quantization_config")
    own = how.get(base)
    size = own.get("group_size") if isinstance(own, dict) else None
    return int(size or how.get("group_size") or _GROUP)
