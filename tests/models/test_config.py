"""Entries of config.json, and the defaults of an architecture."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from umbel.models.errors import ModelLoadError
from umbel.models.estimate.config import ModelConfig
from umbel.models.estimate.facts import read_facts
from umbel.models.estimate.layers import numbers_of
from umbel.models.load.loader import load

from ..tiny import tiny_model_dir

KEYS = [
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_context_length",
    "max_sequence_length",
]


@pytest.mark.parametrize(
    ("config", "length"),
    [
        *(({key: 4096}, 4096) for key in KEYS),
        *(({"text_config": {key: 4096}}, 4096) for key in KEYS),
        ({"max_position_embeddings": 64, "text_config": {"max_position_embeddings": 128}}, 64),
        ({"max_position_embeddings": None, "text_config": None}, 1_048_576),
        ({"max_position_embeddings": 4096.0}, 4096),
        ({"model_max_length": 1e30}, (1 << 31) - 1),
        ({}, 1_048_576),
    ],
)
def test_context_length_is_found_where_models_put_it(config: dict[str, Any], length: int) -> None:
    assert ModelConfig(config).context_length == length


def scaled(kind: str, factor: float, original: int | None = None) -> dict[str, Any]:
    entry = {"rope_type": kind, "factor": factor}
    return entry if original is None else entry | {"original_max_position_embeddings": original}


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 384,
    "max_position_embeddings": 320,
}


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (scaled("yarn", 4.0, 256), 1024),
        (scaled("linear", 4.0, 256), 1024),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 256}, 1024),
        (scaled("yarn", 1.0, 256), 320),
        # Llama 3.2 has 32 times 8,192, and was made for half of that, which it states.
        (scaled("llama3", 32.0, 256), 320),
        # Without the original length it is not known which of both the stated one is.
        (scaled("linear", 4.0), 320),
        ({"rope_type": "yarn", "factor": None}, 320),
        ({}, 320),
    ],
)
def test_a_scaling_lengthens_the_context(scaling: dict[str, Any], length: int) -> None:
    assert ModelConfig(LLAMA | {"rope_scaling": scaling}).context_length == length


@pytest.mark.parametrize(("model_type", "length"), [("qwen3", 1024), ("starcoder2", 320)])
def test_scaling_counts_only_if_the_architecture_uses_it(model_type: str, length: int) -> None:
    more = {
        "model_type": model_type,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "rope_parameters": scaled("yarn", 4.0, 256) | {"rope_theta": 1e4},
    }
    assert ModelConfig(LLAMA | more).context_length == length


def test_a_lengthened_context_is_served(tmp_path: Path) -> None:
    folder = tiny_model_dir(
        tmp_path, max_position_embeddings=320, rope_scaling=scaled("yarn", 4.0, 256)
    )
    assert load(str(folder)).context_length == 1024
    assert read_facts(folder).config.context_length == 1024


GEMMA = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def test_missing_entries_take_the_architectures_defaults() -> None:
    config = ModelConfig(GEMMA)
    assert config.context_length == 32_768
    assert numbers_of(config, window=False) == (1024, 1024)


@pytest.mark.parametrize("model_type", ["mamba", "mamba2"])
def test_models_without_positions_have_no_limit(model_type: str) -> None:
    assert ModelConfig({"model_type": model_type}).context_length == 1_048_576


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in KEYS for value in (-5, 0)),
        ("max_position_embeddings", "many"),
        ("max_position_embeddings", True),
        ("max_position_embeddings", 0.5),
        ("max_position_embeddings", float("nan")),
        ("hidden_size", -64),
        ("num_attention_heads", 0),
        ("num_hidden_layers", 1 << 40),
        ("vocab_size", [1]),
        ("rope_theta", -1),
        ("rope_theta", float("inf")),
        ("rope_theta", [1e4, 0]),
        ("rope_scaling", {"rope_type": "linear", "factor": -2}),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_impossible_numbers_are_refused(
    tmp_path: Path, key: str, value: Any, *, nested: bool
) -> None:
    folder = tiny_model_dir(tmp_path)
    path = folder / "config.json"
    entries = json.loads(path.read_text())
    path.write_text(
        json.dumps(entries | ({"text_config": {key: value}} if nested else {key: value}))
    )
    for read in (read_facts, lambda path: load(str(path))):
        with pytest.raises(ModelLoadError, match=f"{re.escape(str(path))} says {key}"):
            read(folder)


def test_a_base_for_each_layer_is_sound(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path)
    entries = json.loads((folder / "config.json").read_text()) | {"rope_theta": [1e4, 5e6]}
    (folder / "config.json").write_text(json.dumps(entries))
    assert ModelConfig.read(folder).context_length == 2048


# -- ends of answers -----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tiny_model_dir(tmp_path, eos_token_id=None)
    path = folder / "tokenizer_config.json"
    entries = json.loads(path.read_text()) | {"eos_token": "<|im_start|>"}
    path.write_text(json.dumps(entries))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({}, None, {1}),
        ({"eos_token_id": [1, 2]}, None, {1, 2}),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 1}, {1, 2}),
        ({"eos_token_id": 1}, {"eos_token_id": [0, 2]}, {0, 1, 2}),
        ({"text_config": {"eos_token_id": 2}}, None, {1, 2}),
        ({"text_config": {"eos_token_id": [2]}}, {"eos_token_id": 0}, {0, 1, 2}),
        ({"eos_token_id": 0, "text_config": {"eos_token_id": 2}}, {"eos_token_id": 1}, {0, 1, 2}),
        # A default of another vocabulary, where 70 is an ordinary token.
        ({"text_config": {"eos_token_id": 70}}, {"eos_token_id": 2}, {1, 2}),
        ({"eos_token_id": 70}, None, {1, 70}),
        ({"eos_token_id": -1}, {"eos_token_id": ["2", -1, None, True]}, {1}),
    ],
)
def test_ends_are_united(
    folder: Path, config: dict[str, Any], generation: Any, ends: set[int]
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert load(str(folder)).text.eos_ids == ends


def test_unusable_generation_config_names_no_ends(folder: Path) -> None:
    (folder / "generation_config.json").write_bytes(b"\xff{")
    assert load(str(folder)).text.eos_ids == {1}
