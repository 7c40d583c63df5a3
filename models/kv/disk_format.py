"""State as the bytes of a file: spans and checkpoints for the thread that writes, and back.

Bytes go out and come in as they are, so that restored state is the saved state. State that is read
is first compared with the form of the model's own: what its layers keep, without the values and
the tokens. State of another form would fail every request that begins like it.
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
from .checkpoints import Chunk, PackedCheckpoint, Record, Recurrent, Ring
from .spans import PackedSpan, Places, Storage

_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint8: "U8",
    mx.bool_: "BOOL",
}
_PIECE = 4 << 20  # bytes that the writing thread copies at a time
_LENGTH = 8  # bytes at a file's start with the length of its header
_METADATA = "__metadata__"  # in the header, the one entry that is no array
_RECORDS: dict[str, type[Record]] = {kind.__name__: kind for kind in (Ring, Recurrent, Chunk)}
_DIMENSIONS = 4  # of keys and values: rows, heads, tokens, size


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
    """State for the thread that writes it: its arrays by name, and their metadata."""

    tensors: dict[str, HostArray]
    metadata: dict[str, str]


class StateForm:
    """The form of a model's state.

    Args:
        span: of some tokens, as the model has computed it; None if it keeps none.
        checkpoint: likewise.
    """

    def __init__(self, span: PackedSpan | None, checkpoint: PackedCheckpoint | None) -> None:
        self._tokens = None if span is None else _form_of_tokens(span)
        self._layers = None if checkpoint is None else _form_of_layers(checkpoint)

    def check_span(self, span: PackedSpan) -> None:
        """Raise a StoredStateError for the state of tokens in another form."""
        if _form_of_tokens(span) != self._tokens:
            raise StoredStateError("the file holds keys and values of another form")

    def check_checkpoint(self, checkpoint: PackedCheckpoint) -> None:
        """Raise a StoredStateError for another form, or for layers at different offsets."""
        if _form_of_layers(checkpoint) != self._layers:
            raise StoredStateError("the file holds a whole state of another form")
        tensors = _tensors(checkpoint.arrays, checkpoint.places)
        for record, arrays in zip(checkpoint.records, tensors, strict=True):
            lengths = {array.shape[-2] for array in arrays}
            if record.offset != checkpoint.offset or not _fits(record, lengths):
                raise StoredStateError("the file's whole state is not that of its offset")


class DiskCodec:
    """Exports state to the thread that writes files, and reads it back.

    The thread that runs the model copies nothing for that, and waits for nothing. Where the host
    can read what the device wrote, the parts of an array are views of it: they keep the whole
    buffer alive, and the reader makes its own copy of one part at a time. Where it cannot (CUDA),
    they are copies whose computing was launched. Reading an array moves its buffer to the host,
    which must not happen to an array that the model reads.

    Attributes:
        copies: all exported state takes memory of its own.

    Args:
        host_reads: the host can read arrays where the device wrote them.
        form: of the model's state; None accepts any.
    """

    def __init__(self, *, host_reads: bool, form: StateForm | None = None) -> None:
        self.copies = not host_reads
        self._form = form

    def load_span(self, parts: Sequence[tuple[Path, int, int]]) -> PackedSpan:
        """Read consecutive tokens back from the files that hold them.

        Args:
            parts: for each file, which of its tokens: `[start, stop)`.

        Raises:
            StoredStateError: a file differs from the saved one, or has another form.
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
        span = PackedSpan(Storage(joined, places))
        if self._form is not None:
            self._form.check_span(span)
        return span

    def load_checkpoint(self, path: Path) -> PackedCheckpoint:
        """Read a checkpoint back from its file; raises as `load_span` does."""
        arrays, metadata = _read(path)
        try:
            offset = int(metadata["offset"])
            records = [_record(entry) for entry in json.loads(metadata["records"])]
        except (KeyError, TypeError, ValueError) as error:
            raise StoredStateError(f"the file's records make no sense: {error}") from error
        _evaluate(arrays)
        checkpoint = PackedCheckpoint(offset, records, arrays, _places(metadata))
        if self._form is not None:
            self._form.check_checkpoint(checkpoint)
        return checkpoint

    def export_span(self, span: PackedSpan, start: int, stop: int) -> Exported:
        """Export the tokens `[start, stop)` of a span."""
        storage, first = span.storage, span.start
        arrays = storage.arrays(0, storage.length)
        tokens = (Ellipsis, slice(first + start, first + stop), slice(None))
        return Exported(self._hosted(arrays, tokens), {"places": json.dumps(span.places)})

    def export_checkpoint(self, checkpoint: PackedCheckpoint) -> Exported:
        """Export a checkpoint."""
        records = [{"kind": type(r).__name__, **asdict(r)} for r in checkpoint.records]
        metadata = {
            "places": json.dumps(checkpoint.places),
            "records": json.dumps(records),
            "offset": str(checkpoint.offset),
        }
        return Exported(self._hosted(checkpoint.arrays, (Ellipsis,)), metadata)

    def _hosted(self, arrays: Sequence[mx.array], which: tuple[Any, ...]) -> dict[str, HostArray]:
        """Export some items of each array, which are evaluated."""
        hosted, copy = {}, self.copies
        for number, array in enumerate(arrays):
            part = array[which] if copy else _host_view(array)[which]
            pieces = [mx.array(piece) if copy else piece for piece in _pieces(part)]
            hosted[str(number)] = HostArray(_NAMES[array.dtype], tuple(part.shape), pieces)
        if copy:
            launch([array.parts for array in hosted.values()])
        return hosted


# -- bytes -------------------------------------------------------------------------------


def _host_view(array: mx.array) -> NDArray[Any]:
    """View an evaluated array's memory as unsigned integers: NumPy lacks some types.

    Without MLX's `view`: its evaluation waits for all that was launched before.

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
        _check_header(path)
        raise UnreadableStateError(f"the file cannot be read: {error}") from error


def _check_header(path: Path) -> None:
    """Tell a broken file from one that cannot be read just now: MLX raises the same for both.

    Raises:
        StoredStateError: the file is missing, or has another length than its header says.
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
    """Read now: a lazy array would read later, when the path may name another file."""
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


# -- form --------------------------------------------------------------------------------


def _form_of_tokens(span: PackedSpan) -> list[Any]:
    arrays = span.arrays
    if any(a.ndim != _DIMENSIONS or a.shape[-2] != span.length for a in arrays):
        raise StoredStateError("the file's keys and values are not those of its tokens")
    return [
        [(a.dtype, a.shape[1], a.shape[3]) for a in layer]
        for layer in _tensors(arrays, span.places)
    ]


def _form_of_layers(checkpoint: PackedCheckpoint) -> list[Any]:
    layers = _tensors(checkpoint.arrays, checkpoint.places)
    if len(layers) != len(checkpoint.records):
        raise StoredStateError("the file's records are not those of its layers")
    return [
        _form_of_layer(record, arrays)
        for record, arrays in zip(checkpoint.records, layers, strict=True)
    ]


def _form_of_layer(record: Record, arrays: list[mx.array]) -> tuple[Any, ...]:
    if isinstance(record, Recurrent):
        # Which floating type it has may depend on how it was computed.
        kinds = [mx.issubdtype(array.dtype, mx.floating) for array in arrays]
        return Recurrent, record.present, kinds, [array.shape[1:] for array in arrays]
    if any(array.ndim != _DIMENSIONS for array in arrays):
        raise StoredStateError("the file's windows are no keys and values")
    tensors = [(array.dtype, array.shape[1], array.shape[3]) for array in arrays]
    if isinstance(record, Ring):
        return Ring, record.keep, record.max_size, tensors
    return Chunk, record.chunk_size, tensors


def _fits(record: Record, lengths: set[int]) -> bool:
    """True if a layer's arrays have as many tokens as its record says."""
    if isinstance(record, Ring):
        length = min(record.offset, record.max_size)
        return lengths == {length} and 0 <= record.index <= length
    if isinstance(record, Chunk):
        return lengths == {record.offset - record.start} and record.start >= 0
    return True


def _tensors(arrays: Sequence[mx.array], places: Places) -> list[list[mx.array]]:
    """For each layer the packed arrays that hold its tensors."""
    rows = [array.shape[0] if array.ndim else 0 for array in arrays]
    for place in places:
        for number, row in place:
            if not (0 <= number < len(arrays) and 0 <= row < rows[number]):
                raise StoredStateError("the file's layout names arrays that are not there")
    return [[arrays[number] for number, _ in place] for place in places]
