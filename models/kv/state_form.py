"""The form of a model's state: what its layers keep, without the values and the tokens.

State from a file is compared with it before anything is restored from that. What differs in form
would fail every request that begins like it.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..errors import StoredStateError
from .non_trimmable import Chunk, Record, Recurrent, Ring
from .packed import PackedCheckpoint
from .spans import PackedSpan

_DIMENSIONS = 4  # of keys and values: rows, heads, tokens, size


class StateForm:
    """What the state of a model looks like.

    Args:
        span: of some tokens, as the model has computed it; None if it keeps no such.
        checkpoint: likewise.
    """

    def __init__(self, span: PackedSpan | None, checkpoint: PackedCheckpoint | None) -> None:
        self._tokens = None if span is None else _form_of_tokens(span)
        self._layers = None if checkpoint is None else _form_of_layers(checkpoint)

    def check_span(self, span: PackedSpan) -> None:
        """Refuse the state of tokens in another form.

        Raises:
            StoredStateError: it is.
        """
        if _form_of_tokens(span) != self._tokens:
            raise StoredStateError("the file holds keys and values of another form")

    def check_checkpoint(self, checkpoint: PackedCheckpoint) -> None:
        """Refuse a whole state in another form, or one whose layers are at different offsets.

        Raises:
            StoredStateError: it is.
        """
        if _form_of_layers(checkpoint) != self._layers:
            raise StoredStateError("the file holds a whole state of another form")
        tensors = _tensors(checkpoint.arrays, checkpoint.places)
        for record, arrays in zip(checkpoint.records, tensors, strict=True):
            lengths = {array.shape[-2] for array in arrays}
            if record.offset != checkpoint.offset or not _fits(record, lengths):
                raise StoredStateError("the file's whole state is not that of its offset")


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
    """Whether a layer's arrays have as many tokens as its record says."""
    if isinstance(record, Ring):
        length = min(record.offset, record.max_size)
        return lengths == {length} and 0 <= record.index <= length
    if isinstance(record, Chunk):
        return lengths == {record.offset - record.start} and record.start >= 0
    return True


def _tensors(
    arrays: Sequence[mx.array], places: Sequence[Sequence[tuple[int, int]]]
) -> list[list[mx.array]]:
    """For each layer the packed arrays that its tensors lie in."""
    rows = [array.shape[0] if array.ndim else 0 for array in arrays]
    for place in places:
        for number, row in place:
            if not (0 <= number < len(arrays) and 0 <= row < rows[number]):
                raise StoredStateError("the file's layout names arrays that are not there")
    return [[arrays[number] for number, _ in place] for place in places]
