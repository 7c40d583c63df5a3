"""What computing takes beside weights, from a model's configuration.

The daemon measures it on the loaded model. These figures stand for what it would find; tests hold
them to what it finds of the models that they have.
"""

from ..memory_profile import MemoryProfile, StateSizes
from ..transients import Transients
from .config import ModelConfig

_HIDDEN = 8  # arrays of a token's hidden size that are alive at a time
_INNER = 3  # of what a feed-forward layer computes with
_SCORE = 4  # bytes of a score that is not fused away


def estimated_profile(
    config: ModelConfig, sizes: StateSizes, width: int, *, fused: bool
) -> MemoryProfile:
    """Estimate what a model needs to run.

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
