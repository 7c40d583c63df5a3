"""Estimates from a model's files are held to measurements."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from umbel.models.backends import choose, device_name
from umbel.models.backends.prepare import prepare
from umbel.models.errors import ModelLoadError, ModelNotFoundError
from umbel.models.estimate.config import ModelConfig
from umbel.models.estimate.facts import EMBEDDED, estimated_profile, read_facts
from umbel.models.estimate.layers import state_sizes
from umbel.models.kv.layout import CacheLayout
from umbel.models.load.loader import LoadedModel, load
from umbel.models.load.memory_probe import measure, measure_sizes
from umbel.models.memory_profile import MemoryProfile
from umbel.models.params import KVQuantization
from umbel.models.runner import prefill

from .. import zoo
from ..tiny import tiny_model_dir

FP32 = 4

cpu_only = pytest.mark.skipif(device_name() != "cpu", reason="what computing takes is the CPU's")


@pytest.mark.parametrize("name", zoo.NAMES)
def test_state_matches_the_measurement(name: str) -> None:
    model = zoo.make(name)
    layout = CacheLayout(model)
    sizes = measure_sizes(layout, lambda tokens, cache: prefill(model, tokens, cache))
    estimated = state_sizes(ModelConfig(zoo.config_of(name)), FP32)
    assert estimated.token == sizes.token
    assert sorted(estimated.rings) == sorted(sizes.rings)
    assert estimated.fixed == sizes.fixed
    assert estimated.layers == sizes.layers
    assert estimated.arrays == sizes.arrays


def profile_of(model: Any, vocab: int) -> MemoryProfile:
    backend = choose()
    prepare(model, backend)
    return measure(
        CacheLayout(model),
        lambda tokens, cache: prefill(model, tokens, cache),
        backend,
        vocab,
        contiguous=False,
        multiple=1,
    )


@cpu_only
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma3_text"])
def test_peaks_match_the_measurement(name: str) -> None:
    config = ModelConfig(zoo.config_of(name))
    estimated = estimated_profile(config, state_sizes(config, FP32), FP32, fused=False)
    found = profile_of(zoo.make(name), zoo.VOCAB_SIZE)
    for tokens in (1000, 8000):
        assert estimated.worst_case(tokens).nbytes == pytest.approx(
            found.worst_case(tokens).nbytes, rel=0.33
        )


def test_the_embedded_model_is_known(smollm2: LoadedModel) -> None:
    assert EMBEDDED.resident(fp32=smollm2.backend.limits.fp32) == smollm2.weight_bytes
    assert EMBEDDED.config.context_length == smollm2.context_length
    args = smollm2.model.args
    for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"):
        assert EMBEDDED.config.number(key) == getattr(args, key)
    sizes = state_sizes(EMBEDDED.config, FP32)
    assert sizes.token == FP32 * 2 * args.num_hidden_layers * args.num_key_value_heads * 64


# -- weights -------------------------------------------------------------------------------


def quantised_dir(path: Path, **how: Any) -> Path:
    model, config = load_model(tiny_model_dir(path / "plain"))
    model, config = quantize_model(model, config, **how)
    folder = path / "quantised"
    save_model(folder, model)
    save_config(config, folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((path / "plain" / name).read_bytes())
    return folder


@cpu_only
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_weights_match_the_loaded_ones(tmp_path: Path, bits: int | None) -> None:
    if bits is None:
        folder = tiny_model_dir(tmp_path)
    else:
        folder = quantised_dir(tmp_path, group_size=32, bits=bits)
    facts, loaded = read_facts(folder), load(str(folder))
    assert facts.resident(fp32=True) == loaded.weight_bytes
    held = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0 <= held - facts.resident(fp32=False) < 1 << 14  # the header
    assert facts.config.context_length == loaded.context_length


def test_parts_that_are_not_loaded_do_not_count(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "mlx"},
        "model.norm.weight": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]},
        "vision_tower.norm.weight": {"dtype": "BF16", "shape": [8], "data_offsets": [16, 32]},
        "mtp.norm.weight": {"dtype": "BF16", "shape": [8], "data_offsets": [32, 48]},
    }
    write(tmp_path, header)
    (tmp_path / "config.json").write_text("{}")
    weights = read_facts(tmp_path).weights
    assert weights == (16, 32, 2)


def write(folder: Path, header: Any, name: str = "model.safetensors") -> None:
    text = json.dumps(header).encode()
    (folder / name).write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ({}, ModelNotFoundError, "holds no config.json"),
        ({"config.json": b"{}"}, ModelNotFoundError, "holds no model*.safetensors"),
        ({"config.json": b"[]"}, ModelLoadError, "it is no object"),
        ({"config.json": b"{"}, ModelLoadError, "cannot read"),
        ({"config.json": b"{}", "model.safetensors": b"\xff" * 16}, ModelLoadError, "header would"),
        ({"config.json": b"{}", "model.safetensors": b"\2" + b"\0" * 9}, ModelLoadError, "cannot"),
        (
            {
                "config.json": b"{}",
                "model.safetensors.index.json": b'{"weight_map": {"a": "model-2.safetensors"}}',
            },
            ModelLoadError,
            "lacks 1 of its files: model-2.safetensors",
        ),
    ],
)
def test_errors_for_folders_without_a_model(
    tmp_path: Path, files: dict[str, bytes], error: type[Exception], said: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error) as raised:
        read_facts(tmp_path)
    assert said in str(raised.value)


def test_quantised_keys_take_less(tmp_path: Path) -> None:
    facts = read_facts(tiny_model_dir(tmp_path, head_dim=32))
    plain = facts.profile(fp32=True).sizes.token
    quantised = facts.profile(fp32=True, quantization=KVQuantization(8, 32)).sizes.token
    assert quantised == plain // 4 + plain // FP32 // 32 * 2 * FP32
