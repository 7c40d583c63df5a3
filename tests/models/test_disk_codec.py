"""State is handed to the thread that writes it: nothing is copied, computed or waited for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from umbel.cachestore.ledger import Kind, Ledger
from umbel.cachestore.spans import Loan, Spans
from umbel.models.kv import disk_format
from umbel.models.kv.disk_format import DiskCodec
from umbel.models.kv.spans import PackedSpan, copied

from .test_stored import APART, CODECS, HOST, Stored, bits, write


def _computes(*_: object) -> NoReturn:
    raise AssertionError("something is computed")


def _addresses(parts: Sequence[Any]) -> list[int]:
    return [np.frombuffer(cast("bytes", part), np.uint8).ctypes.data for part in parts]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", mx.bfloat16), ("gemma3_text", mx.float32), ("deepseek_v3", mx.float32)],
    ids=str,
)
def test_to_hand_over_copies_nothing(
    name: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a whole storage nor a part of one: the parts are views of its very buffers."""
    state = Stored(name, dtype)
    assert state.span is not None
    monkeypatch.setattr(mx, "eval", _computes)
    active = mx.get_active_memory()
    for start, stop in ((0, 150), (20, 131)):
        exported = HOST.export_span(state.span, start, stop)
        own: list[Any] = state.span.storage.arrays(0, 150)
        for held, array in zip(own, exported.tensors.values(), strict=True):
            whole = np.ndarray(held.shape, f"u{held.itemsize}", held)
            assert all(np.shares_memory(part, whole) for part in array.parts)
            assert not any(part.flags.owndata for part in array.parts)
    if state.checkpoint is not None:
        HOST.export_checkpoint(state.checkpoint)
    assert mx.get_active_memory() == active


def test_what_the_host_cannot_read_is_copied_by_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is launched and not waited for, and the model's own buffers are left alone."""
    span = Stored("llama", mx.bfloat16).span
    assert span is not None
    launched: list[Any] = []
    monkeypatch.setattr(disk_format, "launch", launched.append)
    active = mx.get_active_memory()
    parts = [
        part
        for start, stop in ((0, 150), (20, 131))
        for array in APART.export_span(span, start, stop).tensors.values()
        for part in array.parts
    ]
    assert mx.get_active_memory() == active, "nothing is computed here"
    assert len(launched) == 2
    own = _addresses(span.storage.arrays(0, 150))
    assert not set(own) & set(_addresses(parts))
    assert mx.get_active_memory() - active >= sum(part.nbytes for part in parts)


def test_what_is_handed_over_is_counted_until_it_is_let_go_of() -> None:
    """The cache gives a storage up; its bytes are in memory, and in the ledger, until then."""
    span = Stored("llama", mx.float32).span
    assert span is not None
    nbytes, ledger = span.nbytes, Ledger()
    spans = Spans(ledger.account(Kind.KV))
    spans.add(span)
    exported = HOST.export_span(span, 20, 30)
    loan = Loan.of(span, ledger)
    active = mx.get_active_memory()
    spans.close(span)
    assert mx.get_active_memory() == active
    assert ledger.held(Kind.PAGING).nbytes == ledger.total.nbytes == nbytes
    exported.tensors.clear()
    assert mx.get_active_memory() <= active - nbytes
    loan.give_back()
    assert not ledger.total.nbytes


@CODECS
@pytest.mark.parametrize("piece", [1, 100, 3000, 20_000])
def test_parts_are_short(
    codec: DiskCodec, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer copies one at a time; in order they are the array."""
    span = Stored("gemma3_text", mx.float32).span
    assert span is not None
    monkeypatch.setattr(disk_format, "_PIECE", piece)
    exported = codec.export_span(span, 20, 131)
    longest = max(part.nbytes for array in exported.tensors.values() for part in array.parts)
    assert longest <= max(piece, 4)
    loaded = HOST.load_span([(write(tmp_path, "s.safetensors", exported), 0, 111)])
    assert bits(loaded.arrays) == bits(PackedSpan(copied(span.storage, 20, 131)).arrays)
