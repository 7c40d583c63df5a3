"""Files of the disk tier: their format, and every way in which one can be damaged."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
import xxhash

from umbel.cachestore.disk.files import (
    HostTensor,
    Payload,
    new_name,
    own_files,
    verify_file,
    write_file,
)
from umbel.cachestore.errors import DamagedFileError, DiskTierError, UnreadableFileError

from .disk_tools import payload

MIXED = {
    "bfloat16": (mx.bfloat16, "BF16"),
    "float16": (mx.float16, "F16"),
    "float32": (mx.float32, "F32"),
    "uint32": (mx.uint32, "U32"),
    "uint8": (mx.uint8, "U8"),
}


def bytes_of(array: mx.array) -> memoryview:
    mx.eval(array)
    return memoryview(cast("bytes", array))


def load(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    return cast(
        "tuple[dict[str, mx.array], dict[str, str]]", mx.load(str(path), return_metadata=True)
    )


def test_mlx_loads_written_files(tmp_path: Path) -> None:
    """Every type, also of no items or no dimensions, with odd lengths, and the metadata."""
    arrays = {
        name: (mx.random.normal((2, 3, 5)) * 100).astype(dtype)
        for name, (dtype, _) in MIXED.items()
    }
    arrays["empty"], arrays["scalar"] = mx.zeros((2, 0, 5)), mx.array(7.5)
    tensors = {
        name: HostTensor(MIXED.get(name, ("", "F32"))[1], array.shape, [bytes_of(array)])
        for name, array in arrays.items()
    }
    metadata = {"layers": "[1, 2]", "größe": "\n\"'"}
    name = new_name()
    nbytes, checksum = write_file(tmp_path, name, Payload(tensors, metadata))
    loaded, described = load(tmp_path / name)
    assert described == metadata
    assert loaded.keys() == arrays.keys()
    for key, array in arrays.items():
        assert loaded[key].dtype == array.dtype
        assert loaded[key].shape == array.shape
        assert mx.array_equal(loaded[key], array).item()
    assert list(tmp_path.iterdir()) == [tmp_path / name]
    assert (tmp_path / name).stat().st_size == nbytes
    assert xxhash.xxh3_128((tmp_path / name).read_bytes()).digest() == checksum


def test_a_payload_without_tensors_is_a_file_too(tmp_path: Path) -> None:
    name = new_name()
    nbytes, checksum = write_file(tmp_path, name, Payload({}, {}))
    verify_file(tmp_path / name, nbytes, checksum)
    assert load(tmp_path / name) == ({}, {})


def test_tensors_begin_at_eight_bytes(tmp_path: Path) -> None:
    for length in range(9):
        name = new_name()
        write_file(tmp_path, name, payload()._replace(metadata={"x": "y" * length}))
        header = int.from_bytes((tmp_path / name).read_bytes()[:8], "little")
        assert header % 8 == 0
        assert json.loads((tmp_path / name).read_bytes()[8 : 8 + header])["x"]["shape"] == [1000]


@pytest.mark.parametrize("items", [(1 << 20) - 1, 1 << 20, (2 << 20) + 1])
def test_payloads_of_several_blocks(tmp_path: Path, items: int) -> None:
    name, given = new_name(), payload(items)
    nbytes, checksum = write_file(tmp_path, name, given)
    verify_file(tmp_path / name, nbytes, checksum)
    assert np.array_equal(
        np.array(load(tmp_path / name)[0]["x"]), cast("Any", given.tensors["x"].parts[0])
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_parts_are_written_one_after_the_other(tmp_path: Path, dtype: mx.Dtype) -> None:
    """Items with gaps between them, of whatever type, and arrays that MLX has yet to compute."""
    values = mx.random.normal((3, 4, 10, 6)).astype(dtype)
    kind = {mx.float32: "F32", mx.bfloat16: "BF16"}[dtype]
    seen = np.array(values.view(mx.uint32 if dtype == mx.float32 else mx.uint16))
    cut = (slice(None), slice(None), slice(2, 7))
    gaps = [seen[row : row + 1][cut] for row in range(3)]
    lazy = [mx.array(values[:1][cut]), mx.array(values[1:][cut])]
    shape = (3, 4, 5, 6)
    tensors = {"gaps": HostTensor(kind, shape, gaps), "lazy": HostTensor(kind, shape, lazy)}
    name = new_name()
    nbytes, checksum = write_file(tmp_path, name, Payload(tensors, {}))
    verify_file(tmp_path / name, nbytes, checksum)
    for array in load(tmp_path / name)[0].values():
        assert mx.array_equal(array, values[cut]).item()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: original(fd, data[:1111]))
    name = new_name()
    nbytes, checksum = write_file(tmp_path, name, payload())
    verify_file(tmp_path / name, nbytes, checksum)


@pytest.mark.parametrize(
    "tensor",
    [
        HostTensor("F32", (3,), [np.zeros(2, np.float32)]),
        HostTensor("F16", (2,), [np.zeros(2, np.float32)]),
        HostTensor("float32", (2,), [np.zeros(2, np.float32)]),
        HostTensor("F32", (4,), [np.zeros(2, np.float32), np.zeros(1, np.float32)]),
    ],
    ids=["length", "type", "name", "parts"],
)
def test_tensor_of_wrong_size_is_refused(tmp_path: Path, tensor: HostTensor) -> None:
    with pytest.raises(ValueError, match="bytes are no"):
        write_file(tmp_path, new_name(), Payload({"x": tensor}, {}))
    assert list(tmp_path.iterdir()) == []


def test_files_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        name = new_name()
        write_file(tmp_path, name, payload())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    name = new_name()
    temporary = tmp_path / name.replace("safetensors", "tmp")
    (tmp_path / "precious").write_bytes(b"precious")
    for put in (temporary.symlink_to, temporary.hardlink_to):
        put(tmp_path / "precious")
        with pytest.raises(FileExistsError):
            write_file(tmp_path, name, payload())
        assert temporary.read_bytes() == b"precious"
        temporary.unlink()


def test_writing_and_verifying_can_be_given_up(tmp_path: Path) -> None:
    name = new_name()
    answers = iter([False, False, True])
    with pytest.raises(DiskTierError):
        write_file(tmp_path, name, payload(2 << 20), lambda: next(answers))
    assert list(tmp_path.iterdir()) == []
    nbytes, checksum = write_file(tmp_path, name, payload())
    with pytest.raises(DiskTierError):
        verify_file(tmp_path / name, nbytes, checksum, lambda: True)


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "length of the header": lambda path: _flip(path, 0),
    "header": lambda path: _flip(path, 20),
    "data": lambda path: _flip(path, 3000),
    "last byte": lambda path: _flip(path, -1),
    "short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "long": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "missing": lambda path: path.unlink(),
    "folder": _replace_by_folder,
    "link": _replace_by_link,
    "pipe": _replace_by_pipe,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    path = tmp_path / new_name()
    nbytes, checksum = write_file(tmp_path, path.name, payload())
    verify_file(path, nbytes, checksum)
    DAMAGE[damage](path)
    with pytest.raises(DamagedFileError, match=path.name):
        verify_file(path, nbytes, checksum)


@pytest.mark.parametrize("damage", ["short", "empty", "long"])
def test_another_size_needs_no_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    path = tmp_path / new_name()
    nbytes, checksum = write_file(tmp_path, path.name, payload())
    DAMAGE[damage](path)
    monkeypatch.setattr(xxhash, "xxh3_128", None)
    with pytest.raises(DamagedFileError, match=f"bytes, not {nbytes}"):
        verify_file(path, nbytes, checksum)


def test_a_file_that_cannot_be_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / new_name()
    nbytes, checksum = write_file(tmp_path, path.name, payload())

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UnreadableFileError, match="Permission denied"):
        verify_file(path, nbytes, checksum)


def test_only_plain_files_of_our_names_are_ours(tmp_path: Path) -> None:
    ours = {new_name(), new_name().replace(".safetensors", ".tmp")}
    for name in (*ours, "model.safetensors", "notes.tmp", f"x{new_name()}", f"{new_name()}.bak"):
        (tmp_path / name).write_bytes(b"12345")
    (tmp_path / new_name()).mkdir()
    (tmp_path / new_name()).symlink_to(tmp_path / "model.safetensors")
    assert dict(own_files(tmp_path)) == dict.fromkeys(ours, 5)
