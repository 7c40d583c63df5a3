"""Advances sequences over their prompts: one, or several in one call of the model."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .attention.prompt_layers import Together, prompt_layers
from .errors import NotBatchableError
from .kv.buckets import prompt_tokens
from .kv.sequence_cache import SequenceCache
from .load.device import DevicePolicy
from .output_rows import HEAD_UNKNOWN, OutputRows


def prefill(
    model: Any,
    chunks: Sequence[tuple[Sequence[int], SequenceCache]],
    device: DevicePolicy,
    together: Together = Together.MASKED,
) -> None:
    """Advance sequences over tokens, and wait until their state is computed.

    Args:
        model: mlx-lm's.
        chunks: each sequence's tokens, at least one, and its state.
        device: how attention is computed.
        together: how the model computes several.

    Raises:
        NotBatchableError: the model cannot compute several prompts in one call.
    """
    _launch(model, chunks, *padded(chunks, device), device, together)
    for _, cache in chunks:
        cache.detach()
    mx.eval([cache.arrays() for _, cache in chunks])


def begin(
    model: Any,
    chunks: Sequence[tuple[Sequence[int], SequenceCache]],
    device: DevicePolicy,
    outputs: OutputRows,
) -> mx.array:
    """Advance sequences over tokens, and compute what follows the last of each.

    Args:
        model: mlx-lm's, of layers that attend and have no mask of their own.
        chunks: as `prefill` takes them.
        device: how attention is computed.
        outputs: of the model.

    Returns:
        `[sequences, V]` logits, evaluated as the states are.

    Raises:
        NotBatchableError: the model cannot compute several prompts in one call, or it computes
            logits of all tokens.
    """
    rows, lengths = padded(chunks, device)
    with outputs.only(last_tokens(lengths, rows.shape[1])):
        logits = _launch(model, chunks, rows, lengths, device, Together.MASKED)
    if logits.shape[:2] != (len(chunks), 1):
        raise NotBatchableError(HEAD_UNKNOWN)
    logits = logits[:, -1]
    mx.eval(logits, [cache.arrays() for _, cache in chunks])
    return logits


def _launch(
    model: Any,
    chunks: Sequence[tuple[Sequence[int], SequenceCache]],
    rows: np.ndarray,
    lengths: Sequence[int],
    device: DevicePolicy,
    together: Together,
) -> mx.array:
    """Call the model with prompts, and count their tokens; returns its logits."""
    caches, width = [cache for _, cache in chunks], rows.shape[1]
    layers = prompt_layers(caches, lengths, width, device, together)
    logits: mx.array = model(mx.array(rows), cache=layers)
    for cache, length in zip(caches, lengths, strict=True):
        cache.advanced(length)
    return logits


def last_tokens(lengths: Sequence[int], width: int) -> list[int]:
    """Number the last tokens of rows that have so many each, counted through rows of `width`."""
    return [row * width + length - 1 for row, length in enumerate(lengths)]


def padded(
    chunks: Sequence[tuple[Sequence[int], SequenceCache]], device: DevicePolicy
) -> tuple[np.ndarray, list[int]]:
    """Put tokens into rows of one length, `[prompts, width]`; how many each has comes with that."""
    lengths = [len(tokens) for tokens, _ in chunks]
    width = prompt_tokens(max(lengths), len(lengths), device.prompt_multiple)
    rows = np.zeros((len(chunks), width), np.int32)
    for row, (tokens, _) in zip(rows, chunks, strict=True):
        row[: len(tokens)] = tokens
    return rows, lengths
