"""A model's fingerprint: equal exactly where computed state may be shared."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from umbel.models.load.checkpoint import fingerprint
from umbel.models.load.loader import load
from umbel.models.params import KVQuantization

from ..tiny import tiny_model_dir

CONFIG: dict[str, Any] = {"model_type": "llama", "rope_theta": 10000.0, "text": {"b": 1, "a": 2}}


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    files = [tmp_path / "one" / f"model-{i}.safetensors" for i in (1, 2)]
    files[0].parent.mkdir()
    for i, file in enumerate(files):
        file.write_bytes(bytes([i]) * 3_000_000)
    return files


def test_it_is_short_hexadecimal(shards: list[Path]) -> None:
    digits = fingerprint(shards, CONFIG, "float32")
    assert len(digits) == 32
    assert int(digits, 16) >= 0


def test_folder_and_order_do_not_matter(shards: list[Path], tmp_path: Path) -> None:
    moved = [tmp_path / "two" / file.name for file in shards]
    moved[0].parent.mkdir()
    for old, new in zip(shards, moved, strict=True):
        new.write_bytes(old.read_bytes())
    original = fingerprint(shards, CONFIG, "float32")
    assert fingerprint(moved[::-1], CONFIG, "float32") == original


def swap(shards: list[Path]) -> None:
    a, b = (file.read_bytes() for file in shards)
    shards[0].write_bytes(b)
    shards[1].write_bytes(a)


def flip(shards: list[Path], place: int) -> None:
    content = bytearray(shards[1].read_bytes())
    content[place] ^= 1
    shards[1].write_bytes(content)


@pytest.mark.parametrize(
    "change", [swap, list.pop, *(partial(flip, place=place) for place in (0, 1_500_000, 2_999_999))]
)
def test_weights_matter(shards: list[Path], change: Callable[[list[Path]], object]) -> None:
    before = fingerprint(shards, CONFIG, "float32")
    change(shards)
    assert fingerprint(shards, CONFIG, "float32") != before


@pytest.mark.parametrize(
    ("config", "same"),
    [
        (CONFIG | {"rope_theta": 5e5}, False),
        (CONFIG | {"text": {"a": 2, "b": 3}}, False),
        (CONFIG | {"sliding_window": 512}, False),
        # Tools sort config.json, and note where a model came from.
        (dict(reversed(CONFIG.items())) | {"text": {"a": 2, "b": 1}}, True),
        (CONFIG | {"_name_or_path": "other"}, True),
        (CONFIG | {"transformers_version": "other"}, True),
        (CONFIG | {"torch_dtype": "other"}, True),
        (CONFIG | {"dtype": "other"}, True),
    ],
)
def test_configuration_matters(shards: list[Path], config: dict[str, Any], *, same: bool) -> None:
    before = fingerprint(shards, CONFIG, "float32")
    assert (fingerprint(shards, config, "float32") == before) is same


def test_types_of_state_matter(shards: list[Path]) -> None:
    bits = [KVQuantization(bits, size) for bits in (4, 8) for size in (32, 64)]
    ways = [("bfloat16", None), *(("float32", way) for way in (None, *bits))]
    assert len({fingerprint(shards, CONFIG, *way) for way in ways}) == len(ways)


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        fingerprint([tmp_path / "gone.safetensors"], CONFIG, "float32")


def test_loaded_models_are_known_by_their_weights(tmp_path: Path) -> None:
    one, two = (load(str(tiny_model_dir(tmp_path / name))) for name in ("one", "two"))
    other = load(str(tiny_model_dir(tmp_path / "other", seed=1)))
    assert (one.name, two.name) == ("one", "two")
    assert one.fingerprint == two.fingerprint != other.fingerprint
