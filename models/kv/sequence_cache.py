"""The state of one running sequence: leased spans, and a suffix that grows."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache

from ..memory_profile import Held
from .checkpoints import PackedCheckpoint, checkpoint_of
from .spans import PackedSpan, Tensors, pack_suffix, runs_of
from .token_layer import LayerPrefix, TokenLayerCache


class SequenceCache:
    """The state of one running sequence: a record, which `Placement` moves.

    It has one of two forms: layer caches of its own, which prefill and single decoding use, or a
    slot of the batch, which then holds its suffix and its non-trimmable layers. Methods that read
    layers are for the first form; `Placement` has them for both.

    Attributes:
        number: its name in step plans.
        offset: number of tokens computed.
        leased: spans of its first tokens.
        layers: argument of the model, one entry a layer; empty while it has a slot.
        token_layers: its layer caches that are token-addressable.
        non_trimmable: its other layer caches.
        slot: its row of the batch; None where it has layer caches of its own.
        is_lost: a step failed while it was in the batch, and left its layers at different tokens.
        is_contiguous: its keys lie in one piece, in caches of its own.
    """

    def __init__(
        self, number: int, offset: int, leased: Sequence[PackedSpan], layers: list[Any]
    ) -> None:
        self.number = number
        self.offset = offset
        self.leased = list(leased)
        self.slot: int | None = None
        self.is_lost = False
        self.set_layers(layers)
        self._has_spans = bool(self.token_layers)

    @property
    def suffix_length(self) -> int:
        """Tokens after the leased ones."""
        if not self._has_spans:
            return 0
        return self.offset - sum(span.length for span in self.leased)

    def add_tokens(self, tokens: int) -> None:
        """Count tokens that the model was just called with."""
        self.offset += tokens
        for layer in self.token_layers:
            layer.drop_fetched()

    def set_layers(self, layers: list[Any]) -> None:
        """Replace its layer caches; an empty list means that it has none."""
        leaves = list(layer_caches_of(layers))
        self.layers = layers
        self.is_contiguous = False
        self.token_layers: list[TokenLayerCache] = [
            x for x in leaves if isinstance(x, TokenLayerCache)
        ]
        self.non_trimmable: list[Any] = [x for x in leaves if not isinstance(x, TokenLayerCache)]

    def detach(self) -> None:
        """Copy recurrent states, so that they do not keep the chunk that they are slices of."""
        for layer in self.non_trimmable:
            if isinstance(layer, ArraysCache):
                layer.cache = [None if a is None else mx.contiguous(a) for a in layer.cache]

    def arrays(self) -> list[Any]:
        """Every array of its own layer caches, to evaluate."""
        return [layer.state for layer in self.layers]

    @property
    def suffix_is_full(self) -> bool:
        """True if its own layer caches grow with the next token."""
        return any(
            layer.suffix.keys is None or layer.suffix.offset >= _tokens_of(layer.suffix.keys)
            for layer in self.token_layers[:1]
        )

    @property
    def windows_change(self) -> bool:
        """True if the next token replaces the arrays of its own sliding layers.

        A ring that is as long as its window is written in place.
        """
        return any(
            isinstance(layer, ChunkedKVCache)
            or layer.keys is None
            or _tokens_of(layer.keys) > layer.max_size
            or layer.offset >= _tokens_of(layer.keys) < layer.max_size
            for layer in self.non_trimmable
            if not isinstance(layer, ArraysCache)
        )

    def held(self) -> Held:
        """Memory of its own state outside of the batch."""
        arrays = [array for layer in self.layers for array in _arrays_of(layer)]
        return Held(sum(array.nbytes for array in arrays), len(arrays))

    def lease(self, spans: Sequence[PackedSpan]) -> None:
        """Replace the leased spans by others: of the same tokens, or of more or fewer."""
        more = sum(span.length for span in spans) - sum(span.length for span in self.leased)
        self.leased = list(spans)
        runs = runs_of(spans)
        length = sum(run.length for run in runs)
        for index, layer in enumerate(self.token_layers):
            if more > 0:
                layer.drop_oldest(more)
            layer.set_prefix(LayerPrefix(runs, index), length)

    def suffix(self) -> list[Tensors]:
        """The suffix's tokens, for each token-addressable layer."""
        return [layer.suffix_tensors() for layer in self.token_layers if layer.has_suffix]

    def capture(self) -> PackedCheckpoint:
        """Copy the non-trimmable layers at the present offset."""
        return checkpoint_of(self.offset, self.non_trimmable)

    def suffix_span(self, tokens: int | None = None) -> PackedSpan | None:
        """Copy the suffix, or its first tokens, into a span; None if there are none."""
        suffix = [] if tokens == 0 else self.suffix()
        parts = [[(tensor[..., :tokens, :],) for tensor in layer] for layer in suffix]
        return pack_suffix(parts) if parts else None

    def make_contiguous(self) -> None:
        """Copy all keys and values into one piece, layer by layer, which steps then read.

        The model is called with mlx-lm's own caches from now on, which hold all of it.
        """
        if self.is_contiguous:
            return
        for layer in self.token_layers:
            layer.make_contiguous()
        self.layers = [_suffixes(layer) for layer in self.layers]
        self.is_contiguous = True


def _tokens_of(keys: Any) -> int:
    array = keys if isinstance(keys, mx.array) else keys[0]  # a quantised layer has three
    return int(array.shape[-2])


def _suffixes(cache: Any) -> Any:
    if type(cache) is CacheList:
        return CacheList(*[_suffixes(part) for part in cache.caches])
    return cache.suffix if isinstance(cache, TokenLayerCache) else cache


def _arrays_of(layer: Any) -> list[mx.array]:
    """A layer's arrays. Layers with an empty suffix are many, and looked at often."""
    if isinstance(layer, TokenLayerCache) and layer.suffix.keys is None:
        return []
    return flat_arrays(layer.state)


def flat_arrays(nested: Any) -> list[mx.array]:
    """The arrays of a nested structure; anything else in it is left out."""
    if isinstance(nested, mx.array):
        return [nested]
    if isinstance(nested, (list, tuple)):
        return [array for part in nested for array in flat_arrays(part)]
    return []


def layer_caches_of(caches: Iterable[Any]) -> Iterator[Any]:
    """Every cache that is not a list of caches, in the model's order."""
    for cache in caches:
        if type(cache) is CacheList:
            yield from layer_caches_of(cache.caches)
        else:
            yield cache
