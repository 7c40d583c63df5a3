"""Facts about a model that is not loaded."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..memory_profile import MemoryProfile, StateSizes, Transients
from ..params import KVQuantization
from .config import ModelConfig
from .folder import require_regular
from .layers import state_sizes
from .weights import Weights, weights_of

_FP32 = 4
_HIDDEN = 8  # arrays of a token's hidden size that are alive at a time
_INNER = 3  # of what a feed-forward layer computes with
_EMBEDDED = 134_515_008  # numbers of the embedded model
_SCORE = 4  # bytes of a score that is not fused away
_SCALE_AND_BIAS = 2  # numbers that a group of quantised ones shares


class ModelFacts(NamedTuple):
    """The configuration and the weights, on which memory depends."""

    config: ModelConfig
    weights: Weights

    def resident(self, *, fp32: bool) -> int:
        """Bytes of the weights in memory; as fp32 where the device has no other fast type."""
        return self.weights.fp32 if fp32 else self.weights.nbytes

    def profile(self, *, fp32: bool, quantization: KVQuantization | None = None) -> MemoryProfile:
        """Estimate what running it takes, in fp32 as on a CPU or else in the weights' type."""
        width = _FP32 if fp32 else self.weights.width
        sizes = state_sizes(self.config, width)
        if quantization is not None:
            sizes = _quantised(sizes, width, quantization)
        return estimated_profile(self.config, sizes, width, fused=not fp32)


def read_facts(directory: Path) -> ModelFacts:
    """Read a model's configuration and the headers of its weights.

    Raises:
        ModelError: there is no model, or its files cannot be read.
    """
    require_regular(directory)
    config = ModelConfig.read(directory)
    return ModelFacts(config, weights_of(directory, config))


def _quantised(sizes: StateSizes, width: int, quantization: KVQuantization) -> StateSizes:
    bits, group = quantization
    numbers = sizes.token // width
    token = numbers * bits // 8 + numbers // group * _SCALE_AND_BIAS * width
    return replace(sizes, token=token)


def estimated_profile(
    config: ModelConfig, sizes: StateSizes, width: int, *, fused: bool
) -> MemoryProfile:
    """Estimate what computing takes beside weights.

    The daemon measures it on the loaded model. These figures stand for what it would find; tests
    hold them to what it finds of the models that they have.

    Args:
        config: the model's.
        sizes: of a sequence's state.
        width: bytes of a number that is computed.
        fused: attention is one kernel, which keeps no scores.
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
        # A prefill expands the latents of all that it looks at, and has a part of the scores apart.
        expanded += width * heads * config.number("qk_nope_head_dim")
        expanded += width * heads * config.number("v_head_dim")
        scores += width * heads
    transients = Transients(
        base=0.0,
        token=float(width * (_HIDDEN * hidden + _INNER * inner + 3 * heads * size)),
        context=float(expanded),
        pair=float(scores),
    )
    vocab = config.number("vocab_size", default=1 << 17)
    return MemoryProfile(sizes, transients, vocab, contiguous=False)


EMBEDDED = ModelFacts(
    ModelConfig(
        {
            "model_type": "llama",
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
        }
    ),
    # Dequantised when it is loaded, whatever computes it.
    Weights(nbytes=2 * _EMBEDDED, fp32=4 * _EMBEDDED, width=2),
)
"""Of SmolLM2-135M-Instruct, whose file says it in another form."""
