"""Stored state for the thread that writes it to a file, and back from one.

Bytes go out and come in as they are, so that what is restored is what was saved.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ..runtime import launch

import mlx.core as mx  # isort: skip  (after runtime, which chooses the BLAS first)
import numpy as np
from numpy.typing import NDArray

from ..errors import StoredStateError, UnreadableStateError
from .non_trimmable import Chunk, Record, Recurrent, Ring
from .packed import PackedCheckpoint
from .spans import PackedSpan, Places, Storage
from .state_form import StateForm

_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint8: "U8",
    mx.bool_: "BOOL",
}
_PIECE = 4 << 20  # bytes that are copied at a time by the thread that writes
_LENGTH = 8  # bytes at a file's start that say how long its header is
_METADATA = "__metadata__"  # in the header, the one entry that is no array
_RECORDS: dict[str, type[Record]] = {kind.__name__: kind for kind in (Ring, Recurrent, Chunk)}


class HostArray(NamedTuple):
    """One array, for the thread that writes it.

    Attributes:
        dtype: its type as safetensors names it.
        parts: its items in order, in pieces: see `DiskCodec`.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[Any]


class Exported(NamedTuple):
    """State for the thread that writes it: its arrays by name, and what they are."""

    tensors: dict[str, HostArray]
    metadata: dict[str, str]


def load_span(parts: Sequence[tuple[Path, int, int]]) -> PackedSpan:
    """Read consecutive tokens back from the files that hold them.

    Args:
        parts: for each file, which of its tokens: `[start, stop)`.

    Raises:
        StoredStateError: a file is not what was saved.
        OSError: a file cannot be read at present.
    """
    loaded = [_read(path) for path, _, _ in parts]
    places = _places(loaded[0][1])
    if any(_places(metadata) != places for _, metadata in loaded):
        raise StoredStateError("the files hold states of different layouts")
    pieces = [
        [array[..., start:stop, :] for array in arrays]
        for (_, start, stop), (arrays, _) in zip(parts, loaded, strict=True)
    ]
    joined = [
        mx.contiguous(same[0] if len(same) == 1 else mx.concatenate(list(same), axis=-2))
        for same in zip(*pieces, strict=True)
    ]
    _evaluate(joined)
    return PackedSpan(Storage(joined, places))


def load_checkpoint(path: Path) -> PackedCheckpoint:
    """Read a checkpoint back from its file.

    Raises:
        StoredStateError: the file is not what was saved.
        OSError: the file cannot be read at present.
    """
    arrays, metadata = _read(path)
    try:
        offset = int(metadata["offset"])
        records = [_record(entry) for entry in json.loads(metadata["records"])]
    except (KeyError, TypeError, ValueError) as error:
        raise StoredStateError(f"the file's records make no sense: {error}") from error
    _evaluate(arrays)
    return PackedCheckpoint(offset, records, arrays, _places(metadata))


class DiskCodec:
    """Hands state to the thread that writes files, and reads it back.

    The thread that runs the model copies nothing for that, and waits for nothing. Where the host
    can read what the device wrote, the parts of an array are views of it: they keep the whole
    buffer alive, and the reader makes its own copy of one part at a time. Where it cannot (CUDA),
    they are copies that the device has been told to make. To read one moves its buffer to the
    host, which must not happen to an array that the model reads.

    Attributes:
        copies: whether all that it exports takes memory of its own.

    Args:
        host_reads: the host can read arrays where they lie.
        form: of the model's state: what is read in another form is refused. Without it, all is
            taken that can be read.
    """

    def __init__(self, *, host_reads: bool, form: StateForm | None = None) -> None:
        self.copies = not host_reads
        self._form = form

    def load_span(self, parts: Sequence[tuple[Path, int, int]]) -> PackedSpan:
        """Read consecutive tokens; see `load_span`. A file in another form raises as well."""
        span = load_span(parts)
        if self._form is not None:
            self._form.check_span(span)
        return span

    def load_checkpoint(self, path: Path) -> PackedCheckpoint:
        """Read a checkpoint; see `load_checkpoint`. A file in another form raises as well."""
        checkpoint = load_checkpoint(path)
        if self._form is not None:
            self._form.check_checkpoint(checkpoint)
        return checkpoint

    def export_span(self, span: PackedSpan, start: int, stop: int) -> Exported:
        """Hand over the tokens `[start, stop)` of a span."""
        storage, first = span.storage, span.start
        arrays = storage.arrays(0, storage.length)
        tokens = (Ellipsis, slice(first + start, first + stop), slice(None))
        return Exported(self._hosted(arrays, tokens), {"places": json.dumps(span.places)})

    def export_checkpoint(self, checkpoint: PackedCheckpoint) -> Exported:
        """Hand over a checkpoint."""
        records = [{"kind": type(r).__name__, **asdict(r)} for r in checkpoint.records]
        metadata = {
            "places": json.dumps(checkpoint.places),
            "records": json.dumps(records),
            "offset": str(checkpoint.offset),
        }
        return Exported(self._hosted(checkpoint.arrays, (Ellipsis,)), metadata)

    def _hosted(self, arrays: Sequence[mx.array], which: tuple[Any, ...]) -> dict[str, HostArray]:
        """Hand over some items of each array, which are evaluated."""
        hosted, copy = {}, self.copies
        for number, array in enumerate(arrays):
            part = array[which] if copy else _seen(array)[which]
            pieces = [mx.array(piece) if copy else piece for piece in _pieces(part)]
            hosted[str(number)] = HostArray(_NAMES[array.dtype], tuple(part.shape), pieces)
        if copy:
            launch([array.parts for array in hosted.values()])
        return hosted


def _seen(array: mx.array) -> NDArray[Any]:
    """Look at an evaluated array where it lies, as unsigned integers: NumPy lacks some types.

    Not by way of MLX's `view`: to evaluate that waits for all that was launched before.

    Raises:
        ValueError: its items have gaps between them.
    """
    buffer: Any = array
    bits, strides = f"u{array.itemsize}", memoryview(buffer).strides
    return np.ndarray(tuple(array.shape), bits, buffer, strides=strides)


def _pieces(array: Any) -> Iterator[Any]:
    """Cut an array, of MLX or NumPy, into pieces of at most `_PIECE` bytes, in row-major order."""
    if array.nbytes <= _PIECE or not array.ndim:
        yield array
        return
    each = array.nbytes // len(array)
    if each > _PIECE:
        for row in array:
            yield from _pieces(row)
        return
    rows = _PIECE // each
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def _read(path: Path) -> tuple[list[mx.array], dict[str, str]]:
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        arrays, metadata = loaded
        return [arrays[str(number)] for number in range(len(arrays))], metadata
    except (ValueError, KeyError) as error:
        raise StoredStateError(f"the file makes no sense: {error}") from error
    except RuntimeError as error:
        _check_form(path)
        raise UnreadableStateError(f"the file cannot be read: {error}") from error


def _check_form(path: Path) -> None:
    """Tell a file that is broken from one that MLX cannot read just now: it says the same of both.

    Raises:
        StoredStateError: it is missing, or not as long as it says.
        OSError: it cannot be read at present.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            size = os.fstat(file.fileno()).st_size
            header = json.loads(file.read(min(length, size)))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != _METADATA]
    except FileNotFoundError as error:
        raise StoredStateError("the file is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoredStateError(f"the file's header makes no sense: {error}") from error
    if _LENGTH + length + max(ends, default=0) != size:
        raise StoredStateError("the file is not as long as it says")


def _evaluate(arrays: list[mx.array]) -> None:
    """Read now: what a lazy array reads later may be another file by then."""
    try:
        mx.eval(arrays)
    except RuntimeError as error:
        raise UnreadableStateError(f"the file cannot be read: {error}") from error


def _places(metadata: dict[str, str]) -> Places:
    try:
        stored = json.loads(metadata["places"])
        return tuple(tuple((int(n), int(row)) for n, row in place) for place in stored)
    except (KeyError, TypeError, ValueError) as error:
        raise StoredStateError(f"the file's layout makes no sense: {error}") from error


def _record(entry: dict[str, Any]) -> Record:
    kind = _RECORDS[entry.pop("kind")]
    if "present" in entry:
        entry["present"] = tuple(entry["present"])
    return kind(**entry)
