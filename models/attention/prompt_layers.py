"""Which layers a call of several prompts has."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from mlx_lm.models.cache import ArraysCache, ChunkedKVCache

from ..errors import NotBatchableError
from ..kv.sequence_cache import SequenceCache, layer_caches_of
from ..kv.token_layer import TokenLayerCache
from ..load.device import DevicePolicy
from .blocks import BLOCK
from .joint import prompts_of
from .latent import LatentLayer
from .padded import JointLayer, PaddedLayer, PromptsLayer
from .separate import layers_of


class Together(IntEnum):
    """How a model computes several prompts in one call."""

    NEVER = 0
    MASKED = 1
    """Each layer is given a mask of each row, which the model passes on to attention."""
    LATENT = 2
    """Layers are given no mask, and the model expands the latents of all that rows read."""


def prompt_layers(
    caches: Sequence[SequenceCache],
    lengths: Sequence[int],
    width: int,
    device: DevicePolicy,
    together: Together,
) -> list[Any]:
    """View the caches of several sequences as those of one call; one has its own.

    Args:
        caches: for each row its sequence's.
        lengths: tokens of each row in this call.
        width: of all rows, with padding.
        device: how attention is computed.
        together: how the model does it.

    Raises:
        NotBatchableError: a layer's state cannot be a row.
    """
    first, *others = caches
    if not others:
        return first.layers
    if any(type(layer) in (ArraysCache, ChunkedKVCache) for layer in layer_caches_of(first.layers)):
        raise NotBatchableError(
            "prompts of layers that are recurrent or attend in chunks are computed one by one"
        )
    latent = together is Together.LATENT
    joint = latent or (width <= BLOCK and not any(cache.is_contiguous for cache in caches))
    prompts = prompts_of(caches, width, device) if joint else None
    index = {id(layer): number for number, layer in enumerate(first.token_layers)}

    def attending(rows: list[Any]) -> PromptsLayer:
        if prompts is None or type(rows[0]) is not TokenLayerCache:
            return PaddedLayer(rows, lengths)
        kind = LatentLayer if latent else JointLayer
        return kind(rows, lengths, prompts, index[id(rows[0])], device)

    rows = [cache.segmented if latent else cache.layers for cache in caches]
    return layers_of(rows, attending)
