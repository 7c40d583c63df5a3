"""Advances a sequence over its prompt, one prompt a call of the model.

The call with a prompt's last token gives the logits of what follows.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .backends.output_rows import OutputRows
from .kv.sequence_cache import SequenceCache


def prefill(model: Any, tokens: Sequence[int], cache: SequenceCache) -> None:
    """Advance a sequence over tokens, and wait until its state is computed.

    Args:
        model: mlx-lm's.
        tokens: at least one.
        cache: the sequence's state.
    """
    _advance(model, tokens, cache)
    mx.eval(cache.arrays())


def complete(
    model: Any, tokens: Sequence[int], cache: SequenceCache, outputs: OutputRows
) -> mx.array:
    """Advance a sequence over its prompt's last tokens, and wait until all is computed.

    Args:
        model: mlx-lm's.
        tokens: at least one.
        cache: the sequence's state.
        outputs: of the model.

    Returns:
        `[1, V]` logits of the token that follows.
    """
    with outputs.only([len(tokens) - 1]):
        logits = _advance(model, tokens, cache)[:, -1]
    mx.eval(logits, cache.arrays())
    return logits


def _advance(model: Any, tokens: Sequence[int], cache: SequenceCache) -> mx.array:
    """Call the model on tokens and count them; its logits, not yet evaluated."""
    logits: mx.array = model(mx.array([tokens]), cache=cache.layers)
    cache.advanced(len(tokens))
    cache.detach()
    return logits
