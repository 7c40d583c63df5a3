"""Folders of models with real shapes and random weights, for servers that read a folder.

    uv run python benchmarks/model_folders.py 8b|hybrid|sinks|mla FOLDER

The tokenizer is the embedded model's, and so is the size of the vocabulary. Mixtures of experts
have fewer of them than the models they are like, so that no model has more than 21 GB in bf16.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
from mlx_lm.utils import save_config, save_model
from shapes import SHAPES, on_cpu

from umbel.models.load import embedded

_LLAMA = {
    **SHAPES["8b"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 131_072,
}
_QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "max_position_embeddings": 262_144,
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 512,
    "moe_intermediate_size": 512,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_local_experts": 16,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131_072,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}
_GLM4_MOE_LITE = {
    "model_type": "glm4_moe_lite",  # what else it has are the defaults of mlx-lm
    "n_routed_experts": 16,
    "max_position_embeddings": 202_752,
}
FOLDERS: dict[str, dict[str, Any]] = {
    "8b": _LLAMA,
    "hybrid": _QWEN3_NEXT,
    "sinks": _GPT_OSS,
    "mla": _GLM4_MOE_LITE,
}


def write(shape: str, folder: Path, **changed: Any) -> Path:
    """Write a model, in fp32 on the CPU and in bf16 elsewhere.

    Args:
        shape: of FOLDERS.
        folder: to write to; made if it is missing.
        changed: what is not as in the shape.
    """
    parts = embedded.load(mx.float32)
    config = {
        **FOLDERS[shape],
        "vocab_size": parts.config["vocab_size"],
        "tie_word_embeddings": False,
        "eos_token_id": sorted(parts.tokenizer.eos_token_ids),
        **changed,
    }
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.float32 if on_cpu() else mx.bfloat16)
    save_model(folder, model, donate_model=True)
    save_config(config, config_path=folder / "config.json")
    parts.tokenizer._tokenizer.save_pretrained(folder)  # noqa: SLF001
    return folder


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
