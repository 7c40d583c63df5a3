"""Arrays that a batch's layers give a model in the place of all keys and values.

A model of mlx-lm's passes the arrays that its cache returned on to attention, which is umbel's and
reads the rows itself. So a layer returns the step's own keys and values, and these classes note the
operations that the model applies to them on the way.
"""

import weakref
from typing import Any, NamedTuple

import mlx.core as mx


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
    """Values of a step, which in MLA are the rotated part of keys.

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
        queries: `[rows, heads, 1, size]`, scaled.
    """

    queries: mx.array

    def of(self, row: int) -> "RotatedQueries":
        """Those of one row."""
        return RotatedQueries(self.queries[row : row + 1])
