"""Memory of a model that is not loaded, from its configuration and its weights' headers.

A safetensors file begins with the header's length in eight bytes, and the header: JSON that names
each tensor's type, shape and place. https://huggingface.co/docs/safetensors describes it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelLoadError
from ..memory_profile import MemoryProfile, StateSizes, Transients
from ..params import KVQuantization
from .config import ModelConfig
from .folder import require_regular, weight_files
from .layers import state_sizes

_FP32 = 4
_HIDDEN = 8  # arrays of a token's hidden size that are alive at a time
_INNER = 3  # arrays of a feed-forward layer's inner size
_EMBEDDED = 134_515_008  # numbers of the embedded model
_SCORE = 4  # bytes of a score that is not fused away
_SCALE_AND_BIAS = 2  # numbers that a group of quantised ones shares
_LENGTH = 8
_CHUNKS, _BEFORE = (33, 512, 2048), 2048  # tokens of estimated chunks, and before them
_LONGEST = 100 << 20  # bytes of a header; the format's own bound
_GROUP = 64  # numbers that share a scale, unless the configuration says otherwise
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
    """Bytes of the weights as stored and as fp32, and of a number in computations."""

    nbytes: int
    fp32: int
    width: int


class _Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class ModelFacts(NamedTuple):
    """The configuration and the weights, on which memory depends."""

    config: ModelConfig
    weights: Weights

    def resident(self, *, fp32: bool) -> int:
        """Bytes of the weights in memory; fp32 if the device has no other fast type."""
        return self.weights.fp32 if fp32 else self.weights.nbytes

    def profile(self, *, fp32: bool, quantization: KVQuantization | None = None) -> MemoryProfile:
        """Estimate the memory of running it, in fp32 as on a CPU or in the weights' type."""
        width = _FP32 if fp32 else self.weights.width
        sizes = state_sizes(self.config, width)
        if quantization is not None:
            bits, group = quantization
            numbers = sizes.token // width
            token = numbers * bits // 8 + numbers // group * _SCALE_AND_BIAS * width
            sizes = replace(sizes, token=token)
        return estimated_profile(self.config, sizes, width, fused=not fp32)


def read_facts(directory: Path) -> ModelFacts:
    """Read a model's configuration and weights' headers; raise ModelError if that fails."""
    require_regular(directory)
    config = ModelConfig.read(directory)
    return ModelFacts(config, weights_of(directory, config))


def estimated_profile(
    config: ModelConfig, sizes: StateSizes, width: int, *, fused: bool
) -> MemoryProfile:
    """Estimate the memory of computing, besides weights.

    The daemon measures it on a loaded model; tests hold these figures to the measurements.
    `width` is the size of a number in bytes; a `fused` attention kernel keeps no scores.
    """
    heads = config.number("num_attention_heads", "num_heads", "n_head", default=1)
    hidden = config.number("hidden_size", "n_embd")
    size = config.number("head_dim", default=hidden // max(1, heads))
    experts = config.number("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
    inner = max(
        config.number("intermediate_size", "n_inner", "ffn_hidden_size", default=4 * hidden),
        experts * config.number("moe_intermediate_size", "expert_ffn_hidden_size"),
    )
    expanded, scores = sizes.one_layer(1), 0 if fused or not sizes.layers else _SCORE * heads
    if config.has("kv_lora_rank"):
        # A prefill expands the latents of its whole prefix, and keeps some scores separately.
        expanded += width * heads * config.number("qk_nope_head_dim")
        expanded += width * heads * config.number("v_head_dim")
        scores += width * heads
    token = width * (_HIDDEN * hidden + _INNER * inner + 3 * heads * size)
    near, far = (
        tuple(float(token * n + (expanded + scores * n) * (before + n)) for n in _CHUNKS)
        for before in (0, _BEFORE)
    )
    transients = Transients(_CHUNKS, near, far, _BEFORE)
    vocab = config.number("vocab_size", default=1 << 17)
    return MemoryProfile(sizes, transients, vocab, contiguous=False)


EMBEDDED = ModelFacts(
    ModelConfig({
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
        "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49152, "max_position_embeddings": 8192,
    }),
    Weights(nbytes=2 * _EMBEDDED, fp32=4 * _EMBEDDED, width=2),  # loading always dequantises
)  # fmt: skip
"""Facts about SmolLM2-135M-Instruct, as of a folder in mlx-lm's form."""


def weights_of(directory: Path, config: ModelConfig) -> Weights:
    """Read the headers of a model's files; raise ModelLoadError if one cannot be read."""
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
    """True if a weight belongs to a head that predicts further tokens (MTP).

    Checkpoints have such heads under names of their own, or as layers after the last one.
    """
    if _FURTHER.search(name):
        return True
    found = _LAYER.search(name)
    last = config.layer_count + config.number("num_nextn_predict_layers", "num_mtp_layers")
    return found is not None and config.layer_count <= int(found[1]) < last


def _numbers(tensors: Mapping[str, _Tensor], config: ModelConfig) -> Iterator[int]:
    """Count the numbers of each tensor, dequantised."""
    for name, tensor in tensors.items():
        if name.endswith(_QUANTISED):
            continue
        base = name.removesuffix(".weight")
        scales = tensors.get(f"{base}.scales")
        if scales is None:
            yield prod(tensor.shape)
        else:
            yield prod(scales.shape) * _group_size(base, config)


def _group_size(base: str, config: ModelConfig) -> int:
    how = config.part("quantization") or config.part("quantization_config")
    own = how.get(base)
    size = own.get("group_size") if isinstance(own, dict) else None
    return int(size or how.get("group_size") or _GROUP)
