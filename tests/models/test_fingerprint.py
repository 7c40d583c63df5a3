"""A model's fingerprint: equal exactly where computed state may be shared."""

from pathlib import Path
from typing import Any

import pytest

from umbel.models.load.fingerprint import fingerprint
from umbel.models.load.loader import load
from umbel.models.params import KVQuantization

from ..tiny import tiny_model_dir

CONFIG: dict[str, Any] = {"model_type": "llama", "rope_theta": 10000.0, "text": {"b": 1, "a": 2}}


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Write two weight files."""
    files = [tmp_path / "one" / f"model-{i}.safetensors" for i in (1, 2)]
    files[0].parent.mkdir()
    for i, file in enumerate(files):
        file.write_bytes(bytes([i]) * 3_000_000)
    return files


def test_it_is_short_hexadecimal(shards: list[Path]) -> None:
    """Fingerprints stand in file names and logs."""
    digits = fingerprint(shards, CONFIG, "float32")
    assert len(digits) == 32
    assert int(digits, 16) >= 0


def test_folder_and_order_do_not_matter(shards: list[Path], tmp_path: Path) -> None:
    """A copy of a model elsewhere is the same model."""
    moved = [tmp_path / "two" / file.name for file in shards]
    moved[0].parent.mkdir()
    for old, new in zip(shards, moved, strict=True):
        new.write_bytes(old.read_bytes())
    original = fingerprint(shards, CONFIG, "float32")
    assert fingerprint(moved[::-1], CONFIG, "float32") == original


@pytest.mark.parametrize("place", [0, 1_500_000, 2_999_999])
def test_one_changed_byte_matters(shards: list[Path], place: int) -> None:
    """All of every file is read, first to last byte."""
    before = fingerprint(shards, CONFIG, "float32")
    content = bytearray(shards[1].read_bytes())
    content[place] ^= 1
    shards[1].write_bytes(content)
    assert fingerprint(shards, CONFIG, "float32") != before


def test_swapped_shards_are_another_model(shards: list[Path]) -> None:
    """The same bytes under each other's names are other weights."""
    before = fingerprint(shards, CONFIG, "float32")
    a, b = (file.read_bytes() for file in shards)
    shards[0].write_bytes(b)
    shards[1].write_bytes(a)
    assert fingerprint(shards, CONFIG, "float32") != before


def test_missing_shard_is_another_model(shards: list[Path]) -> None:
    """The number of files counts."""
    assert fingerprint(shards[:1], CONFIG, "f") != fingerprint(shards, CONFIG, "f")


@pytest.mark.parametrize(
    "change", [{"rope_theta": 5e5}, {"text": {"a": 2, "b": 3}}, {"sliding_window": 512}]
)
def test_configuration_matters(shards: list[Path], change: dict[str, Any]) -> None:
    """The same weights under another configuration compute something else."""
    before = fingerprint(shards, CONFIG, "float32")
    assert fingerprint(shards, CONFIG | change, "float32") != before


def test_quantised_keys_and_values_are_other_state(shards: list[Path]) -> None:
    """What is stored with so many bits is never read as if it had others, or none."""
    ways = [None, *[KVQuantization(bits, size) for bits in (4, 8) for size in (32, 64)]]
    assert len({fingerprint(shards, CONFIG, "float32", way) for way in ways}) == len(ways)


def test_order_of_configuration_does_not_matter(shards: list[Path]) -> None:
    """A tool that sorts config.json does not make another model of it."""
    turned = dict(reversed(CONFIG.items())) | {"text": {"a": 2, "b": 1}}
    assert fingerprint(shards, turned, "f") == fingerprint(shards, CONFIG, "f")


@pytest.mark.parametrize("key", ["_name_or_path", "transformers_version", "torch_dtype", "dtype"])
def test_notes_of_tools_do_not_matter(shards: list[Path], key: str) -> None:
    """What only says where a model came from changes nothing it computes."""
    before = fingerprint(shards, CONFIG, "float32")
    assert fingerprint(shards, CONFIG | {key: "other"}, "float32") == before


def test_dtype_matters(shards: list[Path]) -> None:
    """State computed in bf16 is not state computed in fp32."""
    assert fingerprint(shards, CONFIG, "float32") != fingerprint(shards, CONFIG, "bfloat16")


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    """Nothing is named by a hash of what could not be read."""
    with pytest.raises(OSError, match="gone"):
        fingerprint([tmp_path / "gone.safetensors"], CONFIG, "float32")


def test_loaded_models_are_known_by_their_weights(tmp_path: Path) -> None:
    """Through the loader too: the folder's name does not matter, the weights do."""
    one, two = (load(str(tiny_model_dir(tmp_path / name))) for name in ("one", "two"))
    other = load(str(tiny_model_dir(tmp_path / "other", seed=1)))
    assert (one.name, two.name) == ("one", "two")
    assert one.fingerprint == two.fingerprint != other.fingerprint
