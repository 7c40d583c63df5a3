"""Advances sequences over their prompts: one, or several in one call of the model."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .attention.prompt_layers import Together, prompt_layers
from .kv.buckets import prompt_tokens
from .kv.sequence_cache import SequenceCache
from .load.device import DevicePolicy


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
