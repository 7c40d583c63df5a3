"""Models of known shapes with random weights, for benchmarks of time and memory."""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
from mlx_lm.models import llama

from umbel.models.backends import choose
from umbel.models.kv.layout import CacheLayout
from umbel.models.runner import ModelRunner

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {  # Llama-3.1-8B
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "small": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8192,
    },
}


def make(shape: str) -> tuple[Any, ModelRunner]:
    """Make a model in the number type of its device: fp32 on the CPU, bf16 elsewhere."""
    args = llama.ModelArgs.from_dict(
        {
            "model_type": "llama",
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
            **SHAPES[shape],
        }
    )
    mx.random.seed(0)
    model: Any = llama.Model(args)
    model.set_dtype(mx.float32 if on_cpu() else mx.bfloat16)
    mx.eval(model.parameters())
    loaded = SimpleNamespace(
        model=model,
        layout=CacheLayout(model),
        text=SimpleNamespace(vocab_size=args.vocab_size),
        backend=choose(),
    )
    return model, ModelRunner(cast("LoadedModel", loaded))


def on_cpu() -> bool:
    """Return True if the default device is the CPU."""
    return mx.default_device() == mx.Device(mx.cpu)


def tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Make up a prompt."""
    made: list[int] = np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
    return made
