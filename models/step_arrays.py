"""Arrays of a decode step that know what they were made of, so that kernels compute what follows.

A model of mlx-lm's cuts a product into heads, exchanges axes, adds, and takes an array from three
axes to two and back around each product: of the 50 operations of a llama's layer 28 are such views.
A view runs nothing on the device, but on the host it costs as much as half a kernel.

What is defined here is to the model the array that it expects. It is that, too, and is computed
where anybody looks; who knows it takes what it was made of, and what nobody takes is not computed.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import mlx.core as mx


class NotedArray(mx.array):
    """An array with notes on what it was computed of, which hold until its numbers are changed."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the notes."""


def _changing(name: str) -> Callable[..., Any]:
    """A method of MLX that changes an array, for one with notes."""
    change = getattr(mx.array, name)

    def forget_and_change(array: NotedArray, *given: Any) -> Any:
        array.forget()
        return change(array, *given)

    return forget_and_change


_OPERATORS = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
for _name in ("__setitem__", *[f"__i{operator}__" for operator in _OPERATORS.split()]):
    setattr(NotedArray, _name, _changing(_name))


class Flat(NotedArray):
    """A token of each row, `[rows, 1, size]`.

    Attributes:
        flat: the same, `[rows, size]`; None once somebody has changed it.

    Args:
        flat: as above.
    """

    def __init__(self, flat: mx.array) -> None:
        super().__init__(flat.reshape(len(flat), 1, -1))
        self.flat: mx.array | None = flat

    def forget(self) -> None:
        """See `NotedArray`."""
        self.flat = None


def is_step(x: mx.array) -> bool:
    """Whether it is a token of each row, `[rows, 1, size]`."""
    return x.ndim == 3 and x.shape[1] == 1  # noqa: PLR2004


def flat(x: mx.array) -> mx.array:
    """Of a token of each row, `[rows, 1, size]`, make `[rows, size]`."""
    known = x.flat if isinstance(x, Flat) else None
    return x.reshape(len(x), -1) if known is None else known


class Cut(NotedArray):
    """Columns of a product of a token of each row, `[rows, 1, size]`, or of heads.

    A model makes `[rows, 1, heads, size]` of it, and `[rows, heads, 1, size]` of that.

    Attributes:
        product: `[rows, all columns]`; None once somebody has changed what was cut.
        begin: the first of its columns.

    Args:
        plain: the same by MLX.
        product: as above.
        begin: as above.
    """

    def __init__(self, plain: mx.array, product: mx.array | None, begin: int) -> None:
        super().__init__(plain)
        self.product = product
        self.begin = begin

    def forget(self) -> None:
        """See `NotedArray`."""
        self.product = None

    def reshape(self, *shape: Any, **options: Any) -> mx.array:
        """Cut it into heads, and know how; see MLX."""
        plain = super().reshape(*shape, **options)
        heads = self.ndim == 3 and plain.ndim == 4 and plain.shape[:2] == self.shape[:2]  # noqa: PLR2004
        return Cut(plain, self.product, self.begin) if heads else plain

    def transpose(self, *axes: Any, **options: Any) -> mx.array:
        """Exchange the axes of tokens and heads, and know it; see MLX."""
        plain = super().transpose(*axes, **options)
        heads_first = self.ndim == 4 and list(axes) == [0, 2, 1, 3]  # noqa: PLR2004
        return Cut(plain, self.product, self.begin) if heads_first else plain


class StepQueries(NotedArray):
    """Queries of a step, whose rotation waits for their layer.

    Attributes:
        plain: `[rows, heads, 1, size]`, not rotated; None once somebody has changed them.
        positions: `[rows]`.
        turn: by how much they are rotated.
        together: by a kernel, rotated: `[1, kv_heads, rows * group, size]`, None before.

    Args:
        rotated: the same by MLX.
        plain: as above.
        positions: as above.
        turn: as above.
    """

    together: mx.array | None = None

    def __init__(self, rotated: mx.array, plain: mx.array, positions: mx.array, turn: Any) -> None:
        super().__init__(rotated)
        self.plain: mx.array | None = plain
        self.positions = positions
        self.turn = turn

    def forget(self) -> None:
        """See `NotedArray`."""
        self.plain = self.together = None


class StepKeys(NotedArray):
    """Keys of a step, whose rotation waits likewise.

    Attributes:
        plain: `[rows, kv_heads, 1, size]`, not rotated; None once somebody has changed them.

    Args:
        rotated: the same by MLX.
        plain: as above.
        queries: that were rotated before, at the same positions and as much.
    """

    def __init__(self, rotated: mx.array, plain: mx.array, queries: StepQueries) -> None:
        super().__init__(rotated)
        self.plain: mx.array | None = plain
        self._queries = weakref.ref(queries)

    @property
    def queries(self) -> StepQueries | None:
        """None once the model has let go of them."""
        return self._queries()

    def forget(self) -> None:
        """See `NotedArray`."""
        self.plain = None


class Attended(NotedArray):
    """What a step's attention gives, `[rows, heads, 1, size]`; of which a model makes a `Flat`.

    Attributes:
        whole: `[rows, heads * size]`; None once somebody has changed it.

    Args:
        plain: the same by MLX.
        whole: as above.
    """

    def __init__(self, plain: mx.array, whole: mx.array | None) -> None:
        super().__init__(plain)
        self.whole = whole

    def forget(self) -> None:
        """See `NotedArray`."""
        self.whole = None

    def transpose(self, *axes: Any, **options: Any) -> mx.array:
        """Exchange the axes of heads and tokens, and know it; see MLX."""
        plain = super().transpose(*axes, **options)
        return Attended(plain, self.whole) if list(axes) == [0, 2, 1, 3] else plain

    def reshape(self, *shape: Any, **options: Any) -> mx.array:
        """Put heads side by side, and know it; see MLX."""
        plain = super().reshape(*shape, **options)
        # A token's heads are side by side with tokens before or after them: there is one token.
        whole = self.whole if is_step(plain) and len(plain) == len(self) else None
        return plain if whole is None else Flat(whole)
