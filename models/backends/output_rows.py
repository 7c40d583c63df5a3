"""Lets a model compute the logits of some tokens only.

mlx-lm's models compute them of every token that they are called with. Of a prompt's last chunk only
those of the last token are wanted: the others are a product with the whole vocabulary for each.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

_HEADS = ("lm_head", "output", "embed_out")
"""mlx-lm's names for the layer that computes logits, where that is not the embedding."""


class OutputRows:
    """Says which tokens of a model's call have logits: all, unless a block says otherwise.

    Attributes:
        known: the layer that computes logits is known; without it all tokens always have some.
    """

    def __init__(self) -> None:
        self.known = True
        self._rows: mx.array | None = None

    def of(self, hidden: mx.array) -> mx.array:
        """Choose the tokens that are wanted, of `[rows, tokens, size]`: `[wanted, 1, size]`."""
        if self._rows is None:
            return hidden
        return hidden.reshape(-1, 1, hidden.shape[-1])[self._rows]

    @contextmanager
    def only(self, rows: Sequence[int]) -> Iterator[None]:
        """Make calls of the model compute the logits of these tokens only, until the block ends.

        Without effect unless `known`.

        Args:
            rows: their numbers, counted through all rows of a call.
        """
        self._rows = mx.array(list(rows)) if self.known else None
        try:
            yield
        finally:
            self._rows = None


def head_class(name: str, layer: Any) -> type | None:
    """The class of a layer that computes logits of wanted tokens only; None if it computes none.

    A layer of this class needs an attribute `outputs`: the `OutputRows` of its model.

    Args:
        name: of the layer, the last part.
        layer: of MLX's class.
    """
    kind = type(layer)
    if kind in {Embedding, QuantizedEmbedding}:
        return _with(_Tied, kind)
    if kind in {Linear, QuantizedLinear} and name in _HEADS:
        return _with(_Head, kind)
    return None


def _with(computing: type, kind: type) -> type:
    return type(kind.__name__, (computing, kind), {})


class _Head:
    """A layer that computes logits of the tokens that are wanted."""

    outputs: OutputRows

    def __call__(self, hidden: mx.array) -> mx.array:
        """Compute them: `[rows, tokens, V]`, or `[wanted, 1, V]`."""
        logits: mx.array = super().__call__(self.outputs.of(hidden))  # type: ignore[misc]
        return logits


class _Tied:
    """An embedding that computes logits of the tokens that are wanted."""

    outputs: OutputRows

    def as_linear(self, hidden: mx.array) -> mx.array:
        """Compute them: `[rows, tokens, V]`, or `[wanted, 1, V]`."""
        logits: mx.array = super().as_linear(self.outputs.of(hidden))  # type: ignore[misc]
        return logits
