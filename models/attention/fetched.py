"""Arrays that a batch's layers give a model in the place of all keys and values.

A model of mlx-lm's passes the arrays that its cache returned on to attention, which is umbel's and
reads the rows itself. So a layer returns the step's own keys and values, and these classes note the
operations that the model applies to them on the way.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

Attend = Callable[..., mx.array]
"""mlx-lm's `scaled_dot_product_attention`, or what is bound in its place."""


class CallKeys(mx.array):
    """Keys of a call in which several sequences attend, each to its own: they know what is read.

    They are what the model holds of all rows' keys and values in one piece: these are freed with
    the last of its references, as if it had been called with one row.

    Args:
        keys: `[rows, kv_heads, tokens, size]`.
        layer: whose they are.
        fetched: what the layer's caches returned.
    """

    def __init__(self, keys: mx.array, layer: Any, fetched: Sequence[Any]) -> None:
        super().__init__(keys)
        self._layer = layer
        self._fetched = fetched

    @abstractmethod
    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None, attend: Attend
    ) -> mx.array:
        """Compute attention of all rows.

        Args:
            queries: `[rows, heads, tokens, size]`.
            scale: of the scores.
            mask: what the layer made.
            sinks: `[heads]`, or None.
            attend: computes that of one cache.

        Returns:
            `[rows, heads, tokens, size of a value]`. Outputs of padding mean nothing.

        Raises:
            NotBatchableError: the model changed the mask.
        """


class Keys(mx.array):
    """A step's keys, which know their layer: some models attend to them from other layers too.

    Args:
        keys: `[rows, kv_heads, 1, size]`.
        layer: whose they are.
    """

    def __init__(self, keys: mx.array, layer: object) -> None:
        super().__init__(keys)
        self._layer = weakref.ref(layer)  # the layer has these keys: no cycle

    @property
    def layer(self) -> object:
        """Whose they are; None once it is gone."""
        return self._layer()


class Rotated(mx.array):
    """Values of a step, or of a call of prompts, which in MLA are the rotated part of keys.

    There the model multiplies queries with all of them, and passes the product to attention as
    a mask. It gets the queries back instead.
    """

    def swapaxes(self, axis1: int, axis2: int, **options: Any) -> mx.array:
        """Stay what it is where the last two are meant: only a product with queries follows."""
        return self if {axis1, axis2} == {-1, -2} else super().swapaxes(axis1, axis2, **options)

    def __rmatmul__(self, queries: mx.array) -> "RotatedQueries":  # type: ignore[misc]
        """Keep the queries for attention. Python asks the right side first if it is a subclass."""
        return RotatedQueries(queries)


class RotatedQueries(NamedTuple):
    """Queries of the keys' rotated part, in the place of a mask.

    Attributes:
        queries: `[rows, heads, tokens, size]`, scaled; a token in a step of decoding.
    """

    queries: mx.array

    def of(self, row: int) -> "RotatedQueries":
        """Those of one row."""
        return RotatedQueries(self.queries[row : row + 1])
