"""State that each layer of an architecture keeps of earlier tokens.

In an unlisted architecture, all layers keep keys and values of all tokens. The classes of
`mlx_lm.models` are the source; tests hold the figures to measurements.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..memory_profile import GROWTH, Ring, StateSizes
from .config import ModelConfig

_STATE_BYTES = 4  # of a number in a recurrent state: they are computed in fp32

_Kinds = Callable[[ModelConfig, int], Sequence[str]]


class Recurrent(NamedTuple):
    """State of a recurrent layer, for any count of tokens."""

    inputs: int  # numbers of the newest tokens, for its convolution
    state: int = 0  # numbers of its state
    arrays: int = 2  # count of arrays


def state_sizes(config: ModelConfig, width: int) -> StateSizes:
    """Estimate the state of a sequence whose numbers have `width` bytes."""
    kinds = kinds_of(config)
    full, windows = numbers_of(config, window=False), numbers_of(config, window=True)
    whole = sum(kind in ("full", "both") for kind in kinds)
    recurrent = sum(kind in ("recurrent", "both") for kind in kinds)
    short = [kind for kind in kinds if kind in ("window", "chunk")]
    each = _RECURRENT[config.type](config) if recurrent else Recurrent(0)
    per_layer = len(full)
    return StateSizes(
        token=whole * sum(full) * width,
        rings=tuple(_ring(config, kind, sum(windows) * width) for kind in short),
        fixed=recurrent * (each.inputs * width + each.state * _STATE_BYTES),
        arrays=2 * (whole * per_layer // 2 + len(short)) + recurrent * each.arrays,
        layers=whole * per_layer // 2,
    )


def kinds_of(config: ModelConfig) -> list[str]:
    """List the state of each layer.

    It is `full` (all tokens), `window`, `chunk`, `recurrent`, `both` (full, recurrent) or `none`.
    """
    count = config.layer_count
    if config.type in _TWICE:
        count = config.number("num_layers")
    count -= config.number("num_kv_shared_layers")
    return list(_KINDS.get(config.type, _all("full"))(config, count))


def numbers_of(config: ModelConfig, *, window: bool) -> tuple[int, ...]:
    """Count the numbers of a token in each array of a layer, with a window or without."""
    heads = config.number("num_attention_heads", "n_head", default=1)
    hidden = config.number("hidden_size", "n_embd")
    of_keys = config.number("num_key_value_heads", default=heads)
    size = config.number("head_dim", "hidden_size_per_head", default=hidden // heads)
    if config.type in _DIVIDED:
        size = hidden // heads
    if config.type in _EXPANDED:
        keys = config.number("qk_nope_head_dim") + config.number("qk_rope_head_dim")
        return heads * keys, heads * config.number("v_head_dim", default=keys)
    if config.has("kv_lora_rank"):
        latent = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
        twice = latent if config.type in _TWICE else ()
        index = config.number("index_head_dim") if config.type in _INDEXED else 0
        return (*latent, *twice, *((index, index) if index else ()))
    if config.type == "gemma4" and not window:
        size = config.number("global_head_dim", default=512)
        if config.has("attention_k_eq_v"):
            of_keys = config.number("num_global_key_value_heads", default=of_keys)
    return of_keys * size, of_keys * config.number("v_head_dim", default=size)


def _ring(config: ModelConfig, kind: str, token: int) -> Ring:
    if kind == "chunk":
        return Ring(token, config.number("attention_chunk_size", default=8192), spare=GROWTH)
    default = {"gemma3": 512, "gemma4": 512, "cohere2": 4096}.get(config.type, 4096)
    return Ring(token, config.number("sliding_window", default=default))


# -- which layer keeps what ----------------------------------------------------------------


def _all(kind: str) -> _Kinds:
    return lambda _, count: [kind] * count


def _where(whole: Callable[[ModelConfig, int, int], bool], others: str = "recurrent") -> _Kinds:
    """Layers for which `whole` is true, by index and count, keep all tokens."""
    return lambda config, count: [
        "full" if whole(config, i, count) else others for i in range(count)
    ]


def _every(period: int, others: str, *keys: str) -> _Kinds:
    """The last layer of each period keeps all tokens; entries `keys` may set the period."""

    def is_last(config: ModelConfig, layer: int, _: int) -> bool:
        return (layer + 1) % (config.number(*keys, default=period) or 1) == 0

    return _where(is_last, others)


def _named(names: Mapping[str, str], unnamed: _Kinds | None = None) -> _Kinds:
    """`layer_types` names the layers; other names, and by default all layers, are full."""

    def kinds(config: ModelConfig, count: int) -> Sequence[str]:
        types = config.words("layer_types")[:count]
        if not types:
            return (unnamed or _all("full"))(config, count)
        return [names.get(each, "full") for each in types]

    return kinds


def _of_kimi(config: ModelConfig, layer: int, _: int) -> bool:
    return layer + 1 not in config.part("linear_attn_config").get("kda_layers", ())


def _of_plamo(config: ModelConfig, layer: int, count: int) -> bool:
    step = config.number("mamba_step", default=2)
    return layer == count - 1 if count <= step // 2 else layer % step == step // 2


def _of_jamba(config: ModelConfig, layer: int, _: int) -> bool:
    period = config.number("attn_layer_period", default=1)
    return layer % period == config.number("attn_layer_offset")


def _of_lfm(config: ModelConfig, count: int) -> Sequence[str]:
    whole = config.words("full_attn_idxs")
    if not whole:
        return _named({"conv": "recurrent"})(config, count)
    return ["full" if i in whole else "recurrent" for i in range(count)]


def _of_nemotron(config: ModelConfig, count: int) -> list[str]:
    letters = config.words("hybrid_override_pattern") or "*" * count
    return [{"M": "recurrent", "*": "full"}.get(letter, "none") for letter in letters]


_LFM = ("lfm2", "lfm2_moe")
_QWEN = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
_SLIDING = {"sliding_attention": "window"}
_KINDS: Mapping[str, _Kinds] = {
    **dict.fromkeys(
        ("llama", "ministral3", "mistral3", "gemma3n", "afmoe", "exaone_moe", "mellum"),
        _named(_SLIDING),
    ),
    "gpt_oss": _named(_SLIDING, _every(2, "window")),
    "olmo3": _named(_SLIDING, _every(4, "window")),
    "gemma3": _every(6, "window", "sliding_window_pattern"),
    "gemma4": _named(_SLIDING, _every(5, "window", "sliding_window_pattern")),
    "cohere2": _every(4, "window", "sliding_window_pattern"),
    "llama4": _every(4, "chunk"),
    **dict.fromkeys(_QWEN, _every(4, "recurrent", "full_attention_interval")),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _all("recurrent")),
    "falcon_h1": _all("both"),
    "kimi_linear": _where(_of_kimi),
    "plamo2": _where(_of_plamo),
    **dict.fromkeys(_LFM, _of_lfm),
    "nemotron_h": _of_nemotron,
    "granitemoehybrid": _named({"mamba": "recurrent"}),
    "jamba": _where(_of_jamba),
}
_DIVIDED = frozenset(_LFM)
"""Architectures whose heads divide the hidden size, whatever else the configuration says."""
_EXPANDED = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
"""Architectures that keep what they expand from a latent, and not the latent."""
_TWICE = frozenset({"longcat_flash"})
"""Layers with two attentions."""
_INDEXED = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Layers that keep keys of an indexer too, whose values are as long."""


# -- recurrent layers ----------------------------------------------------------------------


def _gated_delta(config: ModelConfig) -> Recurrent:
    keys = config.number("linear_num_key_heads") * config.number("linear_key_head_dim")
    heads, size = config.number("linear_num_value_heads"), config.number("linear_value_head_dim")
    taps = config.number("linear_conv_kernel_dim", default=4) - 1
    state = heads * size * config.number("linear_key_head_dim")
    return Recurrent(taps * (2 * keys + heads * size), state)


def _kimi(config: ModelConfig) -> Recurrent:
    linear = config.part("linear_attn_config")
    heads, size = int(linear.get("num_heads", 0)), int(linear.get("head_dim", 0))
    taps = int(linear.get("short_conv_kernel_size", 4)) - 1
    return Recurrent(taps * 3 * heads * size, heads * size * size, arrays=4)


def _mamba(config: ModelConfig) -> Recurrent:
    """Mamba's first version: a state for each channel."""
    expanded = config.number("mamba_expand", default=2) * config.number("hidden_size")
    inner = expanded if config.type == "jamba" else config.number("intermediate_size", "d_inner")
    taps = config.number("conv_kernel", "d_conv", "mamba_d_conv", default=4) - 1
    return Recurrent(taps * inner, inner * config.number("state_size", "d_state", "mamba_d_state"))


def _mamba2(config: ModelConfig) -> Recurrent:
    """Mamba's second version: a state for each head, and a wider convolution."""
    heads = config.number("mamba_num_heads", "mamba_n_heads", "num_heads")
    size = config.number("mamba_head_dim", "mamba_d_head", "head_dim", "hidden_size_per_head")
    if config.type == "plamo2":
        size = config.number("hidden_size_per_head")
    inner = config.number("mamba_d_ssm", default=heads * size)
    state = config.number("ssm_state_size", "mamba_d_state", "state_size")
    groups = config.number("n_groups", "mamba_n_groups", default=1)
    taps = config.number("conv_kernel", "mamba_d_conv", default=4) - 1
    channels = inner if config.type == "plamo2" else inner + 2 * groups * state
    return Recurrent(taps * channels, heads * size * state)


def _lfm(config: ModelConfig) -> Recurrent:
    taps = config.number("conv_L_cache", default=3) - 1
    return Recurrent(taps * config.number("hidden_size"), arrays=1)


_RECURRENT: Mapping[str, Callable[[ModelConfig], Recurrent]] = {
    **dict.fromkeys(_QWEN, _gated_delta),
    "kimi_linear": _kimi,
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), _mamba),
    **dict.fromkeys(("mamba2", "plamo2", "falcon_h1", "nemotron_h", "granitemoehybrid"), _mamba2),
    **dict.fromkeys(_LFM, _lfm),
}
