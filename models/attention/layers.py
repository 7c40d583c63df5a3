"""A batch's layers, as a model sees them: rows of one token each in the place of a layer's cache.

A model of mlx-lm's passes the arrays that its cache returned on to attention, which is umbel's and
reads the rows itself. So a layer returns the step's own keys and values, and the classes of these
arrays note the operations that the model applies to them on the way.
"""

import weakref
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import NotBatchableError


class Keys(mx.array):
    """A step's keys, which know their layer: some models attend to them from other layers too.

    Args:
        keys: `[rows, kv_heads, 1, size]`.
        layer: that returned them.
    """

    def __init__(self, keys: mx.array, layer: object) -> None:
        super().__init__(keys)
        self._layer = weakref.ref(layer)  # the layer has these keys: no cycle

    @property
    def layer(self) -> object:
        """The layer that returned them; None once it is gone."""
        return self._layer()


class Rotated(mx.array):
    """Values of a step, which in MLA are the rotated part of keys.

    There the model multiplies queries with all of them, and passes the product to attention as
    a mask. It gets the queries back instead.
    """

    def swapaxes(self, axis1: int, axis2: int, **options: Any) -> mx.array:
        """Return the values unchanged for the last two axes: only a product follows."""
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


class Query(NamedTuple):
    """The arguments of a step's attention.

    Attributes:
        queries: `[rows, heads, 1, size]`.
        scale: of the scores.
        sinks: `[heads]`, or None.
        rotated: `[rows, heads, 1, size]`, scaled, which MLA multiplies with the keys' rotated part.
    """

    queries: mx.array
    scale: float
    sinks: mx.array | None
    rotated: mx.array | None


class BatchedLayer(ABC):
    """One layer of several sequences, for attention."""

    masks_itself = False
    """True if the model's mask is ignored."""

    _fetched: tuple[mx.array, mx.array] | None = None

    @property
    @abstractmethod
    def offset(self) -> mx.array:
        """`[rows]` positions of the rows' next tokens."""

    def make_mask(
        self, tokens: int, *, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """Return no mask: a token reads all that its row holds.

        Raises:
            NotBatchableError: the model asks for another mask.
        """
        del return_array
        if tokens != 1 or not self._sees_all(window_size):
            raise NotBatchableError(
                "the model asks for a mask, and rows of a batch are attended to without one"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `[rows, kv_heads, 1, size]`, a token a row; `attend` reads them back."""
        self._append(keys, values)
        self._fetched = Keys(keys, self), Rotated(values)
        return self._fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what `update_and_fetch` did in this step, for layers that read another's keys."""
        if self._fetched is None:
            raise NotBatchableError("the model reads keys before it has written the step's own")
        return self._fetched

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        scale: float,
        sinks: mx.array | None,
        rotated: RotatedQueries | None = None,
    ) -> mx.array:
        """Compute every row's attention over all that it holds.

        Args:
            queries: see `Query`, as for those that follow.
            keys: the array that `update_and_fetch` returned.
            scale: see above.
            sinks: see above.
            rotated: what the model passed as a mask.

        Raises:
            NotBatchableError: `keys` is another array: the model computes with keys itself.
        """
        if self._fetched is None or keys is not self._fetched[0]:
            raise NotBatchableError(
                "the model changes its keys between its cache and its attention"
            )
        return self._attend(Query(queries, scale, sinks, rotated and rotated.queries))

    @abstractmethod
    def _append(self, keys: mx.array, values: mx.array) -> None: ...

    @abstractmethod
    def _attend(self, query: Query) -> mx.array: ...

    @abstractmethod
    def _sees_all(self, window_size: int | None) -> bool:
        """True if a token of this window sees all that its row holds."""
