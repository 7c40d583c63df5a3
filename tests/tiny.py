"""A tiny random llama on disk: loads in no time and answers deterministic nonsense."""

import json
from pathlib import Path
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core, which mlx-lm imports)

import numpy as np  # isort: skip
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = "<|im_end|>"
VOCAB_SIZE = 384
_WEIGHTS = "model.safetensors"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Texts that the merges are learned from. The emoji share three bytes, so that some tokens end
# inside a character and some begin with a space and half a character.
_CORPUS = (
    "system user assistant You are a helpful assistant. What is the capital of France?",
    "the agent reads the plan, writes the code, runs the tests and reports the result",
    "the other agent reads the report and answers the question of the first agent",
    "one two three four five six seven eight nine ten 1 2 3 4 5 6 7 8 9 10 11 12",
    "👩 👨 👧 👦 👩 👨 👧 👦 世界 世界 世界 é é é ñ ñ ñ",
)


def tiny_model_dir(path: Path, *, seed: int = 0, **config_overrides: Any) -> Path:
    """Write a 2-layer random llama with a byte-level tokenizer as mlx-lm wants it.

    The rows of special tokens in the output layer are zero, so that greedy answers run to
    their full length.

    Args:
        path: the folder to write, created where needed.
        seed: of the weights; the same seed gives the same bytes.
        config_overrides: entries of config.json to change; None removes one.

    Returns:
        `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": tokenizer.get_vocab_size(),
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id(EOS),
    } | config_overrides
    config = {key: value for key, value in config.items() if value is not None}
    save_file(_weights(config, seed), path / _WEIGHTS, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return path


def tiny_tokenizer() -> Tokenizer:
    """Train the byte-level BPE of the tiny model: any text round-trips."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def tiny_one_by_one_dir(path: Path) -> Path:
    """Write a tiny model that decodes one by one, as `tiny_model_dir` does.

    One of its weights is not a number, so that its answers in a batch cannot be compared with
    those it gives alone.
    """
    tiny_model_dir(path)
    weights = {name: np.array(value) for name, value in load_file(path / _WEIGHTS).items()}
    weights["lm_head.weight"][0, 0] = np.nan
    save_file(weights, path / _WEIGHTS, {"format": "mlx"})
    return path


def _weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config | {"model_type": "llama"}))
    output = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    output += ".weight"
    weights = {}
    for name, like in sorted(dict(tree_flatten(model.parameters())).items()):
        if name.endswith("norm.weight"):
            value = np.ones(like.shape, np.float32)
        else:
            value = rng.standard_normal(like.shape, np.float32)
            if not name.endswith("embed_tokens.weight"):
                value *= 2 / np.sqrt(like.shape[-1])
        if name == output:
            value[: len(SPECIAL)] = 0
        weights[name] = value
    return weights
