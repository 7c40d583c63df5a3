"""Tiny random models of the architectures that umbel must serve.

Each is built by mlx-lm's own class from a small config, so that it makes that class's caches
and calls them in that class's way. Sliding windows and attention chunks are 32 tokens: prompts
of a few hundred wrap them many times. Weights are fp32 and scaled so that a greedy answer
wanders, depends on what came long before, and is not decided by rounding;
tests/models/test_zoo.py holds them to that.
"""

import importlib
import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import QuantizedKVCache

T = TypeVar("T")

VOCAB_SIZE = 512
WINDOW = 32
"""Of sliding attention and of llama4's chunks, in tokens."""

_Weights = np.ndarray[Any, np.dtype[np.float32]]
_Floats = np.ndarray[Any, np.dtype[np.float64]]
_Config = Mapping[str, Any]

_BASE: _Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_MLA: _Config = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_GATED_DELTA: _Config = {
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
# Two layers that read the keys and values of layers 2 and 3.
_SHARED_KV: _Config = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 16,
}


@dataclass(frozen=True)
class _Species:
    """How to build one architecture.

    Attributes:
        kind: what a cache must do for it; see KINDS.
        config: what differs from _BASE.
        nested: whether the config belongs under text_config.
        embedding: standard deviation of the token embeddings.
        gain: of every matrix; 1 keeps the variance of what passes.
        logits: gain of the output layer.
        norm: weight of the norms.
        qk_norm: weight of the norms of queries and keys, where not that of the others; more
            makes attention choose where it would average.
        final_norm: (name, weight) of the last norm, where that sets the scale of tied logits.
        draw: more of the seed, where the first draw of weights was of no use.
    """

    kind: str
    config: _Config = field(default_factory=dict)
    nested: bool = False
    embedding: float = 1.0
    gain: float = 2.0
    logits: float = 2.0
    norm: float = 1.0
    qk_norm: float | None = None
    final_norm: tuple[str, float] | None = None
    draw: tuple[int, ...] = ()


_SPECIES: Mapping[str, _Species] = {
    # Most tests take this one, and qwen3 has four of the same layers.
    "llama": _Species("dense", {"num_hidden_layers": 2}),
    "qwen3": _Species("dense"),
    "deepseek_v3": _Species("mla", {**_MLA, "n_group": 2}),
    "deepseek_v32": _Species(
        "mla",
        # With few index heads many scores are exactly zero, and which of the equal ones are
        # among the best is then decided by how the prompt was cut.
        {**_MLA, "index_head_dim": 32, "index_n_heads": 16, "index_topk": 64},
    ),
    "glm4_moe_lite": _Species("mla", _MLA),
    "longcat_flash": _Species(
        "mla",
        {
            **_MLA,
            "num_layers": 2,  # with two attentions each
            "attention_method": "MLA",
            "zero_expert_type": "identity",
            "zero_expert_num": 2,
            "ffn_hidden_size": 128,
            "expert_ffn_hidden_size": 64,
            "moe_topk": 2,
            "routed_scaling_factor": 1.0,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "attention_bias": False,
        },
    ),
    "kimi_linear": _Species(
        "hybrid",
        {
            **_MLA,
            "num_hidden_layers": 4,
            "linear_attn_config": {
                "kda_layers": [1, 3],  # counted from 1
                "num_heads": 2,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
            "model_max_length": 4096,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
        },
    ),
    "gemma2": _Species(
        "capped",
        {"query_pre_attn_scalar": 4.0},
        embedding=1 / 8,
        norm=0.0,  # this one adds 1
    ),
    "gemma3_text": _Species(
        "sliding",
        {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 4},
        embedding=1 / 8,
        norm=0.0,  # this one adds 1
    ),
    "gemma3n": _Species(
        "sliding",
        {
            **_SHARED_KV,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.8, 0.8, 0.0, 0.0, 0.0, 0.0],
            "altup_num_inputs": 4,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 16,
        },
        nested=True,
        embedding=1 / 8,
        final_norm=("model.language_model.norm.weight", 2.0),
    ),
    "gemma4_text": _Species(
        "sliding",
        {**_SHARED_KV, "global_head_dim": 64, "final_logit_softcapping": 30.0},
        embedding=1 / 8,
    ),
    "gpt_oss": _Species(
        "sinks",
        {
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
        # In the first draw a router stood within 1e-6 of a tie in one scenario: there the last
        # bit picks the expert, in any two ways of computing, and values cannot be compared.
        draw=(1,),
    ),
    "mamba2": _Species(
        "recurrent",
        {
            "num_hidden_layers": 3,
            "num_heads": 4,
            "state_size": 16,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "layer_norm_epsilon": 1e-5,
            "time_step_limit": (0.0, float("inf")),
            "time_step_rank": "auto",
        },
        gain=1.5,
    ),
    "mamba": _Species(
        "recurrent",
        {
            "num_hidden_layers": 3,
            "state_size": 16,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": "auto",
        },
        gain=1.5,
    ),
    "plamo2": _Species(
        "hybrid",
        {
            "hidden_size_per_head": 32,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_num_heads": 2,
            "mamba_step": 2,
        },
        embedding=1 / 8,
        norm=0.0,  # this one adds 1, or less
    ),
    "falcon_h1": _Species(
        "hybrid",
        {
            "num_hidden_layers": 3,
            "mamba_d_conv": 4,
            "mamba_d_head": 16,
            "mamba_d_ssm": 64,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_n_heads": 4,
            "mamba_rms_norm": True,
        },
    ),
    "lfm2": _Species(
        "hybrid",
        {
            "norm_eps": 1e-6,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [1, 3],
        },
        qk_norm=2.0,
        gain=1.25,  # its convolutions multiply three projections of the same token
        final_norm=("model.embedding_norm.weight", 0.25),
    ),
    "qwen3_5": _Species(
        "hybrid",
        {
            **_GATED_DELTA,
            "rope_parameters": {
                "type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [3, 3, 2],
            },
        },
        nested=True,
    ),
    "qwen3_next": _Species(
        "hybrid",
        {
            **_GATED_DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 64,
            "moe_intermediate_size": 64,
            "mlp_only_layers": [],
            "partial_rotary_factor": 0.5,
        },
    ),
    "llama4": _Species(
        "chunked",
        {
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
        nested=True,
    ),
}

_UNTOLD: Mapping[str, _Species] = {
    "nemotron_h": _Species(
        "hybrid",
        {
            "hybrid_override_pattern": "M-M*",
            "attention_bias": False,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "mamba_proj_bias": False,
            "ssm_state_size": 16,
            "conv_kernel": 4,
            "n_groups": 2,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
        },
        gain=0.5,
    ),
    "baichuan_m1": _Species(
        "hybrid",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "sliding_window_layers": [1, 3],
            "conv_window": 2,
        },
        gain=0.5,
    ),
}

NAMES: tuple[str, ...] = tuple(_SPECIES)
"""The models, by the name of their module in mlx_lm.models."""

UNTOLD: tuple[str, ...] = tuple(_UNTOLD)
"""Models whose recurrent layers mlx-lm tells no lengths where prompts share a call."""

QUANTIZED: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"llama_kv8": ("llama", 8), "llama_kv4": ("llama", 4)}
)
"""Models of above whose keys and values are quantised: which one, and to how many bits."""

GROUP_SIZE = 32
"""Numbers that share a scale: a head has no more."""

ROUNDED = 0.05
"""By which the logits of a quantised model differ from themselves, in the mean, where the same
tokens are computed in other chunks: rounding puts a number that lies between two levels on the
one or the other. Mlx-lm's own differ by up to 0.022, and without quantisation by 5e-6."""

TWINS = frozenset(
    {
        *("qwen3", "deepseek_v32", "glm4_moe_lite", "longcat_flash", "kimi_linear"),
        *("gemma2", "gemma3n", "gemma4_text", "mamba", "plamo2"),
        *("falcon_h1", "lfm2", "qwen3_5", "llama4"),
    }
)
"""Architectures whose kinds of state the other six have, too. The slow tests run one exactness test
of each; every other test parametrised with `NAMES` is nightly for these."""

KINDS: Mapping[str, str] = MappingProxyType({n: s.kind for n, s in _SPECIES.items()})
"""Kind of cache that each model asks for: dense, mla, capped, sliding, sinks, recurrent, hybrid or
chunked."""


def one_of_each_kind() -> list[str]:
    """The first model of each of `KINDS`."""
    kinds = list(KINDS.values())
    return [name for at, (name, kind) in enumerate(KINDS.items()) if kind not in kinds[:at]]


def each(
    values: Iterable[T], names: Iterable[str] = NAMES, once: Container[str] = TWINS - {"llama4"}
) -> list[tuple[str, T]]:
    """Pair models with all values of a test's parameter, and twins with one of them, in turn.

    The chunks of llama4 are no other model's: it has all of them.

    Args:
        values: of the parameter.
        names: of models.
        once: those that are paired with one value.
    """
    values = list(values)
    turns = itertools.cycle(values)
    return [
        (name, value) for name in names for value in ([next(turns)] if name in once else values)
    ]


def params(pairs: Iterable[tuple[str, T]], quick: Container[tuple[str, T]]) -> list[Any]:
    """Parameters of a test of the engine's rules, which know kinds of state and no architecture.

    Args:
        pairs: of models and values; see `each`.
        quick: those that are tested each time. Twins are tested nightly, and others are slow.
    """
    return [
        pytest.param(
            *pair,
            marks=()
            if pair in quick
            else pytest.mark.nightly
            if pair[0] in TWINS
            else pytest.mark.slow,
        )
        for pair in pairs
    ]


def make(name: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Build a model of mlx-lm with random fp32 weights.

    Args:
        name: one of NAMES, UNTOLD or QUANTIZED.
        seed: of the weights; the same seed gives the same weights.
        overrides: entries of the (text) config to change.

    Returns:
        The model, evaluated, in inference mode; its arrays belong to the calling thread.
    """
    if name in QUANTIZED:
        return _quantized(*QUANTIZED[name], seed=seed, **overrides)
    species = _species(name)
    config = config_of(name, **overrides)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(config))
    rng = np.random.default_rng([seed, *name.encode(), *species.draw])
    shapes = {path: like.shape for path, like in dict(tree_flatten(model.parameters())).items()}
    weights = [
        (path, mx.array(_weights(path, shapes[path], species, rng))) for path in sorted(shapes)
    ]
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def _species(name: str) -> _Species:
    return _SPECIES[name] if name in _SPECIES else _UNTOLD[name]


def config_of(name: str, **overrides: Any) -> dict[str, Any]:
    """Return the config.json of one of NAMES or UNTOLD."""
    species = _species(name)
    config = {**_BASE, **species.config, "model_type": name, **overrides}
    return {"model_type": name, "text_config": config} if species.nested else config


def _quantized(name: str, bits: int, **options: Any) -> Any:
    """Build a model that keeps its keys and values quantised."""
    model = make(name, **options)

    def make_cache() -> list[Any]:
        return [QuantizedKVCache(group_size=GROUP_SIZE, bits=bits) for _ in model.layers]

    model.make_cache = make_cache
    return model


def _weights(
    path: str, shape: tuple[int, ...], species: _Species, rng: np.random.Generator
) -> _Weights:
    """Draw one parameter, by what its path says it is."""
    leaf = path.rpartition(".")[2]
    if leaf in _BY_NAME:
        return _BY_NAME[leaf](shape, rng).astype(np.float32)
    if species.final_norm is not None and path == species.final_norm[0]:
        return np.full(shape, species.final_norm[1], np.float32)
    if leaf == "bias":
        return rng.standard_normal(shape, np.float32) * np.float32(0.1)
    if len(shape) == 1:
        of_heads = species.qk_norm is not None and ("q_" in path or "k_" in path)
        return np.full(shape, species.qk_norm if of_heads else species.norm, np.float32)
    if "embed_tokens" in path or "embeddings" in path:
        return rng.standard_normal(shape, np.float32) * np.float32(species.embedding)
    gain = species.logits if path.endswith("lm_head.weight") else species.gain
    # Convolutions are depthwise, [channels, taps, 1]; all others end in what they sum over.
    summed = shape[-1] if shape[-1] > 1 else shape[-2]
    return rng.standard_normal(shape, np.float32) * np.float32(gain / summed**0.5)


def _decay(shape: tuple[int, ...], _: np.random.Generator) -> _Floats:
    """Let the heads forget in 16 to 1024 tokens, given time steps near 1."""
    count = math.prod(shape)
    return np.log(np.geomspace(1 / 16, 1 / 1024, num=count)).reshape(shape)


_BY_NAME: Mapping[str, Callable[[tuple[int, ...], np.random.Generator], _Floats]] = {
    "A_log": _decay,
    "D": lambda shape, _: np.full(shape, 0.5),
    "dt_bias": lambda shape, _: np.full(shape, 0.5),
    **dict.fromkeys(
        ("dt_norm_weight", "B_norm_weight", "C_norm_weight", "q_weight", "k_weight"),
        lambda shape, _: np.ones(shape),
    ),
    "sinks": lambda shape, rng: rng.standard_normal(shape),
    "layer_scalar": lambda shape, _: np.ones(shape),
    "correct_output_scale": lambda shape, _: np.ones(shape),
    "e_score_correction_bias": lambda shape, rng: 0.1 * rng.standard_normal(shape),
}


def weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights."""
    named = cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))
    return sum(leaf.nbytes for _, leaf in named)
