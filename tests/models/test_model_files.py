"""Files of a folder that are a model's: those that the index names, and no others."""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file
from structlog.testing import capture_logs

from umbel.models.errors import ModelError, ModelLoadError
from umbel.models.estimate.facts import read_facts
from umbel.models.estimate.folder import INDEX, weight_files
from umbel.models.load.loader import LoadedModel, load, public_name

from .. import zoo
from ..tiny import tiny_model_dir

WHOLE = "model.safetensors"


def sharded(
    path: Path, names: tuple[str, ...] = ("part-b.safetensors", "part-a.safetensors")
) -> Path:
    tiny_model_dir(path)
    weights = load_file(path / WHOLE)
    (path / WHOLE).unlink()
    of = {name: names[number % len(names)] for number, name in enumerate(weights)}
    for file in names:
        held = {name: value for name, value in weights.items() if of[name] == file}
        save_file(held, path / file, {"format": "mlx"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": of}))
    return path


def zoo_dir(path: Path, name: str, **further: Any) -> Path:
    tiny_model_dir(path)
    model = zoo.make(name)
    (path / "config.json").write_text(json.dumps(zoo.config_of(name)))
    named: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(path / WHOLE), dict(named) | further)
    return path


def logits(loaded: LoadedModel) -> Any:
    return np.array(loaded.model(mx.array([[5, 70, 300, 9]])).astype(mx.float32))


def stale(path: Path) -> None:
    other = tiny_model_dir(path.parent / "other", seed=1)
    (path / WHOLE).write_bytes((other / WHOLE).read_bytes())
    (path / "model-00001-of-00001.safetensors").write_bytes((other / WHOLE).read_bytes())


def sidecar(path: Path) -> None:
    save_file({"mtp.fc.weight": np.ones((4, 4), np.float32)}, path / "model-mtp.safetensors")


@pytest.mark.parametrize(
    ("write", "beside"), [(sharded, stale), (sharded, sidecar), (tiny_model_dir, sidecar)]
)
def test_files_that_do_not_belong_to_the_model_are_not_read(
    tmp_path: Path, tiny: LoadedModel, write: Any, beside: Any
) -> None:
    folder: Path = write(tmp_path / "model")
    alone, size = load(str(folder)).fingerprint, read_facts(folder).weights
    beside(folder)
    loaded = load(str(folder))
    assert np.array_equal(logits(loaded), logits(tiny))
    assert loaded.fingerprint == alone
    assert read_facts(folder).weights == size


@pytest.mark.parametrize("name", ["Qwen3 [4bit]", "a*b", "a?b", "[!a]"])
def test_a_folders_name_is_no_pattern(tmp_path: Path, tiny: LoadedModel, name: str) -> None:
    tiny_model_dir(tmp_path / "aXb", seed=1)
    loaded = load(str(tiny_model_dir(tmp_path / name)))
    assert loaded.name == name
    assert np.array_equal(logits(loaded), logits(tiny))


def test_shards_without_an_index_are_all_read(tmp_path: Path, tiny: LoadedModel) -> None:
    folder = sharded(tmp_path, ("model-1-of-2.safetensors", "model-2-of-2.safetensors"))
    (folder / INDEX).unlink()
    assert [path.name for path in weight_files(folder)] == [
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
    ]
    assert np.array_equal(logits(load(str(folder))), logits(tiny))


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"weight_map": {"a": "gone.safetensors"}}', "lacks 1 of its files: gone.safetensors"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "'../x.safetensors' is no file name"),
        ('{"weight_map": {"a": 1}}', "1 is no file name"),
        ('{"weight_map": {"a": [1]}}', "[1] is no file name"),
        ('{"weight_map": {"a": ".."}}', "lacks 1 of its files: .."),
        ('{"weight_map": []}', "it names no files"),
        ("{}", "it names no files"),
        ("[]", "it is no object"),
        ("{", "cannot read"),
    ],
)
def test_unusable_index_is_an_error(tmp_path: Path, index: str, said: str) -> None:
    folder = tiny_model_dir(tmp_path)
    (folder / INDEX).write_text(index)
    for read in (read_facts, lambda path: load(str(path))):
        with pytest.raises(ModelLoadError) as raised:
            read(folder)
        assert said in str(raised.value)


SNAPSHOT = "models--org--name/snapshots/" + "c0ffee" * 6


@pytest.mark.parametrize(
    ("place", "link", "name"),
    [
        ("plain", None, "plain"),
        ("plain", "my-model", "my-model"),
        (SNAPSHOT, "my-model", "my-model"),
        (SNAPSHOT, None, "org/name"),
        ("snapshots/plain", None, "plain"),
    ],
)
def test_public_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, link: str | None, name: str
) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True)
    if link is not None:
        (tmp_path / link).symlink_to(folder)
        folder = tmp_path / link
    (folder / "below").mkdir()
    assert public_name(str(folder)) == name
    assert public_name(f"{folder}/") == name
    monkeypatch.chdir(folder / "below")
    if link is None:
        assert public_name("..") == name


# -- heads that predict further tokens -----------------------------------------------------


HEADS = {
    "llama": ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.scales"),
    "qwen3_next": ("mtp.fc.weight", "mtp.norm.weight", "mtp.fc.biases"),
    "deepseek_v3": ("model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight"),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_for_further_tokens_are_left_out(tmp_path: Path, name: str) -> None:
    plain = zoo_dir(tmp_path / "plain", name)
    with_heads = zoo_dir(
        tmp_path / "heads", name, **{head: mx.ones((4, 4)) for head in HEADS[name]}
    )
    for folder in (plain, with_heads):
        config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))
    with capture_logs() as lines:
        loaded = load(str(with_heads))
    said = [
        line for line in lines if line["event"] == "heads that predict further tokens are left out"
    ]
    assert [line["weights"] for line in said] == [len(HEADS[name])]
    assert np.array_equal(logits(loaded), logits(load(str(plain))))
    assert read_facts(with_heads).weights == read_facts(plain).weights


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "rotary.weight"])
def test_other_weights_are_an_error(tmp_path: Path, name: str) -> None:
    folder = zoo_dir(tmp_path / "more", "llama", **{name: mx.ones((4, 4))})
    with pytest.raises(ModelLoadError, match=f"llama has no weights of these names: {name}"):
        load(str(folder))


def test_missing_weights_are_counted(tmp_path: Path) -> None:
    folder = tiny_model_dir(tmp_path, num_hidden_layers=3)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 200}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError) as raised:
        load(str(folder))
    assert "mlx-lm's llama lacks 1773 weights: model.layers.10." in str(raised.value)
    assert len(str(raised.value)) < 400


# -- files that are none -------------------------------------------------------------------


READ = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    WHOLE,
    INDEX,
)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_regular_files_are_opened(tmp_path: Path, name: str, kind: str) -> None:
    folder = tiny_model_dir(tmp_path / "model")
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    else:
        path.symlink_to("/dev/zero")
    for read in (read_facts, lambda path: load(str(path))):
        with pytest.raises(ModelLoadError) as raised:
            read(folder)
        assert f"cannot read {path}: it is no regular file" in str(raised.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_files_that_are_read_as_a_whole_have_a_bound(tmp_path: Path, name: str) -> None:
    folder = tiny_model_dir(tmp_path)
    with (folder / name).open("ab") as file:
        file.truncate(1 << 40)
    for read in (read_facts, lambda path: load(str(path))):
        with pytest.raises(ModelLoadError, match="1099511627776 bytes, and umbel reads"):
            read(folder)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("tiktoken.model",), "its tokenizer is a tiktoken.model"),
        ((), "its tokenizer needs Python code of its own"),
    ],
)
def test_a_tokenizer_of_its_own_code_is_refused_with_advice(
    tmp_path: Path, files: tuple[str, ...], said: str
) -> None:
    folder = tiny_model_dir(tmp_path)
    (folder / "tokenizer.json").unlink()
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    for name in files:
        (folder / name).write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(ModelError) as raised:
        load(str(folder))
    assert said in str(raised.value)
    assert "serve a conversion that needs none" in str(raised.value)
    assert "trust_remote_code" not in str(raised.value)


@pytest.mark.parametrize("key", ["chat_template_type", "tool_parser_type"])
@pytest.mark.parametrize("named", ["json", "..utils", "json_tools.x", ["a"], "deepseek_v99"])
def test_a_tokenizer_names_modules_of_mlx_lm_only(tmp_path: Path, key: str, named: Any) -> None:
    folder = tiny_model_dir(tmp_path)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {key: named}))
    with pytest.raises(ModelLoadError) as raised:
        load(str(folder))
    known = "deepseek_v32" if key == "chat_template_type" else "json_tools"
    assert f"{path} says {key} is {named!r}; mlx-lm has " in str(raised.value)
    assert known in str(raised.value)
    path.write_text(json.dumps(settings | {key: known}))
    assert load(str(folder)).text.has_chat_template
