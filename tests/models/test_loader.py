"""A name leads to a model that runs, or to an error in words."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from umbel.models.backends import device_name
from umbel.models.errors import (
    ModelError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedCacheError,
)
from umbel.models.load import hub, loader
from umbel.models.load.loader import LoadedModel, load
from umbel.models.params import KVQuantization

from ..tiny import tiny_model_dir

cpu_only = pytest.mark.skipif(device_name() != "cpu", reason="only the CPU needs fp32")


def dtypes(loaded: LoadedModel) -> set[mx.Dtype]:
    named: Any = tree_flatten(loaded.model.parameters())
    return {leaf.dtype for _, leaf in named}


def logits(loaded: LoadedModel) -> Any:
    return np.array(loaded.model(mx.array([[5, 70, 300, 9]])).astype(mx.float32))


def test_a_directory_loads(tiny: LoadedModel) -> None:
    assert tiny.name == "tiny"
    assert tiny.context_length == 2048
    assert tiny.text.vocab_size == 384
    assert tiny.text.eos_ids == {2}
    assert dtypes(tiny) == {mx.float32}
    assert tiny.weight_bytes == 4 * 123_200
    assert logits(tiny).shape == (1, 4, 384)


def test_the_tiny_model_is_the_same_every_time(tiny: LoadedModel, tmp_path: Path) -> None:
    again = load(str(tiny_model_dir(tmp_path / "again")))
    assert np.array_equal(logits(again), logits(tiny))
    other = load(str(tiny_model_dir(tmp_path / "other", seed=1)))
    assert not np.array_equal(logits(other), logits(tiny))


def test_keys_and_values_are_quantised_as_asked(tmp_path: Path) -> None:
    directory = str(tiny_model_dir(tmp_path / "wide", head_dim=64))
    plain, quantised = load(directory), load(directory, KVQuantization(8, 64))
    assert plain.fingerprint == load(directory).fingerprint != quantised.fingerprint
    assert [layer.quantization for layer in quantised.layout.open().layers] == [(8, 64)] * 2
    narrow = str(tiny_model_dir(tmp_path / "narrow"))
    with pytest.raises(UnsupportedCacheError, match=r"group size 64.*serve it without kv_bits"):
        load(narrow, KVQuantization(8, 64))


@cpu_only
@pytest.mark.parametrize(
    ("mode", "bits", "closeness"), [("affine", 8, 0.05), ("affine", 4, 0.5), ("mxfp4", 4, 0.7)]
)
def test_quantised_weights_are_dequantised_on_the_cpu(
    tmp_path: Path, tiny: LoadedModel, mode: str, bits: int, closeness: float
) -> None:
    directory = tiny_model_dir(tmp_path / "quantised")
    model, config = load_model(directory)
    model, config = quantize_model(model, config, 32, bits, mode=mode)
    save_model(directory, model)
    save_config(config, directory / "config.json")
    quantised = logits(load_raw(directory))
    loaded = load(str(directory))
    assert dtypes(loaded) == {mx.float32}
    assert loaded.weight_bytes == tiny.weight_bytes
    assert loaded.fingerprint != tiny.fingerprint
    # Dequantising adds next to nothing to the error of quantising.
    assert np.abs(logits(loaded) - quantised).max() < 0.01 * np.abs(quantised).max()
    assert np.abs(logits(loaded) - logits(tiny)).mean() < closeness * np.abs(logits(tiny)).mean()


def load_raw(directory: Path) -> Any:
    class Raw:
        model = load_model(directory)[0]

    return Raw


@cpu_only
def test_half_precision_weights_become_fp32(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path / "half")
    file = str(directory / "model.safetensors")
    stored: Any = mx.load(file)
    weights = {k: v.astype(mx.bfloat16) for k, v in stored.items()}
    mx.save_safetensors(file, weights)
    assert dtypes(load(str(directory))) == {mx.float32}


@pytest.mark.parametrize("name", ["nonesuch", "a/b/c", "/no/such/folder"])
def test_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as error:
        load(name)
    for part in (repr(name), "'smollm2'", "directory", "Hugging Face"):
        assert part in str(error.value)


def test_an_empty_directory_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=f"{tmp_path} holds no mlx-lm model"):
        load(str(tmp_path))


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path / "half")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        load(str(directory))


def spoil_header(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(b"not safetensors" + file.read_bytes()[15:])


def cut_tail(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100_000])


def empty_weights(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


def drop_tensor(directory: Path) -> None:
    file = str(directory / "model.safetensors")
    stored: Any = mx.load(file)
    weights = dict(stored)
    mx.eval(weights)
    del weights["lm_head.weight"]
    mx.save_safetensors(file, weights)


def drop_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").unlink()


def spoil_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{")


def spoil_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def drop_model_type(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    del config["model_type"]
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_header,
        cut_tail,
        empty_weights,
        drop_tensor,
        drop_tokenizer,
        spoil_tokenizer,
        spoil_config,
        drop_model_type,
    ],
)
def test_a_broken_model_is_a_load_error_that_names_it(tmp_path: Path, spoil: Any) -> None:
    directory = tiny_model_dir(tmp_path / "broken")
    spoil(directory)
    with pytest.raises(ModelLoadError, match=f"cannot load {directory}: .+"):
        load(str(directory))


def test_weights_that_cannot_be_read_are_a_load_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_model_dir(tmp_path / "unread")

    def fail(*_: object) -> None:
        raise RuntimeError("[read] Unable to read")

    monkeypatch.setattr(mx, "eval", fail)
    with pytest.raises(ModelLoadError, match=f"cannot load {directory}: .read. Unable"):
        load(str(directory))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path / "new", model_type="llama99")
    with pytest.raises(ModelLoadError, match="llama99"):
        load(str(directory))


def test_a_custom_model_file_is_refused_and_never_run(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path / "custom", model_file="custom.py")
    proof = tmp_path / "proof"
    (directory / "custom.py").write_text(f"open({str(proof)!r}, 'w')\n")
    with pytest.raises(ModelLoadError, match=r"custom\.py"):
        load(str(directory))
    assert not proof.exists()


def test_a_custom_tokenizer_is_refused_without_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_model_dir(tmp_path / "custom")
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config |= {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": [None, "custom.Custom"]}}
    file.write_text(json.dumps(config))
    proof = tmp_path / "proof"
    (directory / "custom.py").write_text(f"open({str(proof)!r}, 'w')\n")
    asked: list[str] = []

    def agree(question: str) -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", agree)
    load(str(directory))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="Python code of its own"):
        load(str(directory))
    assert not asked
    assert not proof.exists()


@pytest.mark.parametrize(
    "error", [OSError("no route"), RuntimeError("proxy says no"), ValueError("no such files")]
)
def test_any_failure_of_a_download_names_the_repo(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(hub, "list_files", fail)
    with pytest.raises(ModelNotFoundError, match=f"cannot get 'org/name'.*{error}"):
        load("org/name")


def test_no_code_is_downloaded(monkeypatch: pytest.MonkeyPatch, tiny_dir: Path) -> None:
    monkeypatch.setattr(loader, "fetch", lambda *_: tiny_dir)
    assert load("org/name").name == "org/name"
    assert "model*.safetensors" in hub.FILES
    assert not any(pattern.endswith(("py", "*")) for pattern in hub.FILES)


def test_a_repo_without_network_is_an_error_soon(tmp_path: Path) -> None:
    script = (
        "from umbel.models.errors import ModelNotFoundError\n"
        "from umbel.models.load.loader import load\n"
        "try:\n    load('org/name')\n"
        "except ModelNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("org/name is not on this machine, or not wholly, and ")
    assert "HF_HUB_OFFLINE" in done.stdout


def test_load_errors_have_one_base() -> None:
    assert issubclass(ModelNotFoundError, ModelError)
    assert issubclass(ModelLoadError, ModelError)


IMPORT = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 5000))
import umbel.daemon.lifecycle.server
print(*resource.getrlimit(resource.RLIMIT_NOFILE), resource.setrlimit.__name__)
"""


def test_mlx_lm_does_not_lower_the_limit_of_open_files() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["3000", "5000", "setrlimit"]
