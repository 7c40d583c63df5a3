"""L1 from disk: what is read back is what was saved, bit by bit, and goes on bit by bit."""

import errno
import itertools
import os
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np
import pytest

from umbel.cachestore.disk.files import HostTensor, Payload, write_file
from umbel.models.backends import device_name
from umbel.models.errors import StoredStateError
from umbel.models.kv.checkpoints import PackedCheckpoint
from umbel.models.kv.disk_format import DiskCodec, Exported
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.kv.spans import PackedSpan, copied

from .. import zoo
from ..scenario.memory_tools import words

PROMPT = words(150, "stored")
_FP32_ONLY = {
    *("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "longcat_flash", "kimi_linear"),
    *("gpt_oss", "qwen3_next", "llama4"),
}
"""Mixtures of experts: MLX has the product they need on the CPU in fp32 only (GatherMM)."""
EVERY = [
    *[pytest.param(name, mx.float32, id=name) for name in (*zoo.NAMES, *zoo.QUANTIZED)],
    *[
        pytest.param(
            name,
            mx.bfloat16,
            id=f"{name}-bf16",
            marks=pytest.mark.nightly if name in zoo.TWINS else pytest.mark.slow,
        )
        for name in zoo.NAMES
        if name not in _FP32_ONLY or device_name() != "cpu"
    ],
]
HOST, APART = DiskCodec(host_reads=True), DiskCodec(host_reads=False)
CODECS = pytest.mark.parametrize("codec", [HOST, APART], ids=["host", "apart"])
CUTS = (0, 1, 37, 64, 99, 150)


def write(folder: Path, name: str, exported: Exported) -> Path:
    """Write a file as the disk tier does."""
    tensors = {key: HostTensor(*tensor) for key, tensor in exported.tensors.items()}
    write_file(folder, name, Payload(tensors, exported.metadata), lambda: False)
    return folder / name


def bits(arrays: Any) -> list[bytes]:
    """The arrays' very bytes, types and shapes."""
    found = []
    for array in arrays:
        raw = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        found.append(f"{array.dtype} {array.shape}".encode() + np.array(raw).tobytes())
    return found


class Stored:
    """A model after a prompt, and its state in memory."""

    def __init__(self, name: str, dtype: mx.Dtype) -> None:
        self.model = zoo.make(name)
        self.model.set_dtype(dtype)
        self.layout = CacheLayout(self.model)
        live = self.layout.open()
        self.advance(live, PROMPT[:100])
        self.advance(live, PROMPT[100:])
        self.checkpoint = live.capture() if self.layout.has_checkpoints else None
        self.span = live.suffix_span()

    def advance(self, live: SequenceCache, tokens: list[int]) -> list[bytes]:
        """Advance a state; returns the logits' bits."""
        logits = self.model(mx.array([tokens]), cache=live.layers)
        live.add_tokens(len(tokens))
        mx.eval(logits, live.arrays())
        return bits([logits])

    def goes_on(
        self, spans: list[PackedSpan], checkpoint: PackedCheckpoint | None
    ) -> list[list[bytes]]:
        """Prefill and decode from a restored state."""
        live = self.layout.open(len(PROMPT), spans, checkpoint)
        more = [words(9, "more"), *[[token] for token in words(6, "decode")]]
        return [self.advance(live, tokens) for tokens in more]


@CODECS
@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_from_disk_is_from_memory(
    name: str, dtype: mx.Dtype, codec: DiskCodec, tmp_path: Path
) -> None:
    """The same bytes come back, also cut and joined; continuing gives the same logits."""
    state = Stored(name, dtype)
    spans, loaded_spans = [], []
    if state.span is not None:
        spans = [state.span]
        loaded_spans = [_through_files(codec, state.span, tmp_path)]
        assert bits(loaded_spans[0].arrays) == bits(state.span.arrays)
        assert loaded_spans[0].places == state.span.places
    checkpoint = None
    if state.checkpoint is not None:
        path = write(tmp_path, "c.safetensors", codec.export_checkpoint(state.checkpoint))
        checkpoint = HOST.load_checkpoint(path)
        assert bits(checkpoint.arrays) == bits(state.checkpoint.arrays)
        assert checkpoint.places == state.checkpoint.places
        assert checkpoint.records == state.checkpoint.records
        assert checkpoint.offset == len(PROMPT)
    assert spans or checkpoint
    assert state.goes_on(loaded_spans, checkpoint) == state.goes_on(spans, state.checkpoint)


def _through_files(codec: DiskCodec, span: PackedSpan, folder: Path) -> PackedSpan:
    """Save a span in pieces, and read it back from parts of these."""
    parts = []
    for start, stop in itertools.pairwise(CUTS):
        saved_from = max(0, start - 20)  # of each file only the end is wanted
        path = write(folder, f"{start}.safetensors", codec.export_span(span, saved_from, stop))
        parts.append((path, start - saved_from, stop - saved_from))
    return HOST.load_span(parts)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
def test_split_and_merged_spans_are_saved_alike(name: str, tmp_path: Path) -> None:
    """It makes no difference whether a span was cut before it was saved, or after."""
    span = Stored(name, mx.float32).span
    assert span is not None
    path = write(tmp_path, "w.safetensors", HOST.export_span(span, 0, 150))
    whole = HOST.load_span([(path, 0, 150)])
    left, right = PackedSpan(copied(span.storage, 0, 150)).split(60)
    files = [
        (write(tmp_path, "l.safetensors", HOST.export_span(left, 0, 60)), 0, 60),
        (write(tmp_path, "r.safetensors", HOST.export_span(right, 0, 90)), 0, 90),
    ]
    assert bits(HOST.load_span(files).arrays) == bits(whole.arrays)
    assert bits(left.merge(right).arrays) == bits(whole.arrays)
    assert bits(HOST.load_span([(path, 60, 61)]).arrays) == bits(
        PackedSpan(copied(whole.storage, 60, 61)).arrays
    )


def test_what_is_read_does_not_depend_on_its_file(tmp_path: Path) -> None:
    """Once loaded, a file may be removed or overwritten."""
    state = Stored("qwen3_next", mx.float32)
    assert state.checkpoint is not None
    path = write(tmp_path, "c.safetensors", HOST.export_checkpoint(state.checkpoint))
    loaded = HOST.load_checkpoint(path)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert bits(loaded.arrays) == bits(state.checkpoint.arrays)


@pytest.mark.parametrize("damage", ["empty", "short", "header", "layout", "records", "missing"])
def test_a_file_that_makes_no_sense_is_refused(damage: str, tmp_path: Path) -> None:
    """With the one error that the pager takes for a miss, whatever is wrong."""
    state = Stored("falcon_h1", mx.float32)
    assert state.checkpoint is not None
    assert state.span is not None
    exported = HOST.export_checkpoint(state.checkpoint)
    spans = HOST.export_span(state.span, 0, 150)
    if damage in ("layout", "records"):
        key = "places" if damage == "layout" else "records"
        exported.metadata[key] = spans.metadata["places"] = "[[1"
    path = write(tmp_path, "c.safetensors", exported)
    other = write(tmp_path, "s.safetensors", spans)
    for file in (path, other):
        whole = file.read_bytes()
        if damage == "missing":
            file.unlink()
        elif damage in ("empty", "short"):
            file.write_bytes(b"" if damage == "empty" else whole[: len(whole) // 2])
        elif damage == "header":
            file.write_bytes(b"\xff" * 8 + whole[8:])
    with pytest.raises(StoredStateError):
        HOST.load_checkpoint(path)
    with pytest.raises(StoredStateError):
        HOST.load_span([(other, 0, 150)])


def _fail(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("[load_safetensors] Failed to open file")


def _no_descriptors(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("step", ["load", "look", "read"])
def test_a_file_that_cannot_be_read_is_not_broken(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX says the same of both; the pager must not delete the one that is whole."""
    state = Stored("falcon_h1", mx.float32)
    assert state.checkpoint is not None
    assert state.span is not None
    checkpoint = write(tmp_path, "c.safetensors", HOST.export_checkpoint(state.checkpoint))
    span = write(tmp_path, "s.safetensors", HOST.export_span(state.span, 0, 150))

    def load(path: Path) -> None:
        if path == checkpoint:
            HOST.load_checkpoint(path)
        else:
            HOST.load_span([(path, 0, 150)])

    evaluate = mx.eval
    for path in (checkpoint, span):
        whole = path.read_bytes()

        def cut_short(*arrays: Any, path: Path = path) -> None:
            os.truncate(path, 2000)
            evaluate(*arrays)

        with monkeypatch.context() as patched:
            if step == "read":
                patched.setattr(mx, "eval", cut_short)
            else:
                patched.setattr(mx, "load", _fail)
            if step == "look":
                patched.setattr(Path, "open", _no_descriptors)
            with pytest.raises(OSError, match="Too many open" if step == "look" else "cannot be"):
                load(path)
        path.write_bytes(whole)
        load(path)
