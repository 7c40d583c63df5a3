"""A model as a step of decoding calls it, with prompts in the same call."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .attention.mixed import Slots, mixed_layers
from .attention.prompt_layers import Together, prompt_layers
from .errors import NotBatchableError
from .kv.sequence_cache import SequenceCache
from .load.device import DevicePolicy
from .output_rows import HEAD_UNKNOWN, OutputRows
from .prefill import last_tokens, padded


class MixedCall:
    """Advances prompts in the call of the model that gives others their next tokens.

    Attributes:
        logits: `[prompts, V]`, of what follows each prompt's tokens, once it was called.

    Args:
        model: mlx-lm's.
        slots: of the batch, in which somebody decodes; the first one where one does alone.
        chunks: of each prompt its tokens, at least one, and its state.
        device: how attention is computed.
        outputs: of the model.
    """

    def __init__(
        self,
        model: Any,
        slots: Sequence[int],
        chunks: Sequence[tuple[Sequence[int], SequenceCache]],
        device: DevicePolicy,
        outputs: OutputRows,
    ) -> None:
        self.logits = mx.zeros(0)
        self._model = model
        self._slots = slots
        self._tokens, self._lengths = padded(chunks, device)
        self._caches = [cache for _, cache in chunks]
        self._device = device
        self._outputs = outputs

    def __call__(self, tokens: mx.array, *, cache: Sequence[Any]) -> mx.array:
        """Call the model as a step of decoding does.

        Args:
            tokens: `[rows, 1]`.
            cache: layers of these rows.

        Returns:
            `[rows, 1, V]` logits, not yet evaluated.

        Raises:
            NotBatchableError: the model's layers cannot be those of a mixed step, or it computes
                logits of all tokens.
        """
        _, width = self._tokens.shape
        slots = Slots(self._slots, tokens.shape[0])
        positions = [cache.offset for cache in self._caches]
        own = prompt_layers(self._caches, self._lengths, width, self._device, Together.MASKED)
        layers = mixed_layers(cache, own, slots, positions, width)
        prompts = mx.array(self._tokens.reshape(-1, 1), tokens.dtype)
        ends = [slots.count + last for last in last_tokens(self._lengths, width)]
        wanted = [*range(slots.count), *ends]
        with self._outputs.only(wanted):
            fed = mx.concatenate([slots.gather(tokens), prompts])
            logits: mx.array = self._model(fed, cache=layers)
        if len(logits) > len(wanted):
            raise NotBatchableError(HEAD_UNKNOWN)
        self.logits = logits[slots.count :, -1]
        return slots.spread(logits[: slots.count])

    def advanced(self) -> list[Any]:
        """Count the prompts' tokens; returns what was computed of them, to evaluate."""
        for cache, length in zip(self._caches, self._lengths, strict=True):
            cache.advanced(length)
        return [self.logits, *[cache.arrays() for cache in self._caches]]
