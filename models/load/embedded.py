"""The embedded model: SmolLM2-135M-Instruct from a GGUF (`embedded_file`)."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from .embedded_file import obtain

_CONTROL = 3  # GGUF token type of special tokens

_RENAMED = {
    "blk.": "model.layers.", "token_embd": "model.embed_tokens", "output_norm": "model.norm",
    "ffn_gate": "mlp.gate_proj", "ffn_down": "mlp.down_proj", "ffn_up": "mlp.up_proj",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip

_Gguf = tuple[dict[str, mx.array], dict[str, Any]]


class Embedded(NamedTuple):
    """Parts of the embedded model; its weights are not yet evaluated."""

    model: Any
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    path: Path


def load(dtype: mx.Dtype, path: Path | None = None) -> Embedded:
    """Build mlx-lm's llama from the GGUF at `path`, or from the one that `obtain` finds.

    It is dequantised to `dtype`: MLX's quantised product is slow on CPUs, where this model is used.
    """
    path = path or obtain()
    arrays, metadata = _read(path)
    config = _config(metadata)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = {name: value.astype(dtype) for name, value in _dequantised(arrays).items()}
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    return Embedded(model, _tokenizer(metadata), config, path)


def _read(path: Path) -> _Gguf:
    """Read a GGUF. MLX also opens it for writing, so a read-only one is copied first."""
    if os.access(path, os.W_OK):
        return cast("_Gguf", mx.load(str(path), return_metadata=True))
    with TemporaryDirectory() as folder:
        copy = shutil.copyfile(path, Path(folder, path.name))
        return cast("_Gguf", mx.load(str(copy), return_metadata=True))


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    def read(key: str) -> Any:
        return metadata[f"llama.{key}"].item()

    return {
        "model_type": "llama",
        "hidden_size": read("embedding_length"),
        "num_hidden_layers": read("block_count"),
        "intermediate_size": read("feed_forward_length"),
        "num_attention_heads": read("attention.head_count"),
        "num_key_value_heads": read("attention.head_count_kv"),
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon"),
        "vocab_size": read("vocab_size"),
        "rope_theta": read("rope.freq_base"),
        "rope_traditional": True,  # GGUF stores q and k permuted for interleaved rotation
        "tie_word_embeddings": True,
        "max_position_embeddings": read("context_length"),
    }


def _dequantised(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    group = 32  # of GGUF's Q4_1 and Q8_0
    weights = {}
    for name, value in arrays.items():
        base, _, kind = name.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        scales = arrays.get(f"{base}.scales")
        if scales is not None:
            bits = value.shape[-1] * 32 // (scales.shape[-1] * group)
            biases = arrays[f"{base}.biases"]
            value = mx.dequantize(value, scales, biases, group_size=group, bits=bits)  # noqa: PLW2901
        weights[_renamed(name)] = value
    return weights


def _renamed(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def _tokenizer(metadata: dict[str, Any]) -> TokenizerWrapper:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    fast = FastTokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    eos = metadata["tokenizer.ggml.eos_token_id"].item()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=tokens[eos])
    tokenizer.chat_template = metadata["tokenizer.chat_template"]
    return TokenizerWrapper(tokenizer, eos_token_ids=[eos])
