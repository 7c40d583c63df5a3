"""Rotary position embedding with fewer operations than mlx-lm's layers have.

On a CPU sines and cosines are computed once a call, not by layers. Where MLX has no kernel for it,
`mx.fast.rope` is 33 operations, most of which compute sines and cosines of positions that are the
same in all layers, for queries and for keys: 66 of the 157 operations of a layer of SmolLM2 in a
step of 16 rows. What is computed here is the same to the last bit (`mx.fast.rope`'s fallback,
`mlx/fast.cpp` of MLX 0.32), with eight.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.rope_utils import Llama3RoPE

Offset = int | mx.array
"""Positions of the first tokens: one for all rows, or `[rows]`."""


class Rotation:
    """What modules that rotate alike have together: the sines and cosines of a call.

    Args:
        dims: numbers of a head that are rotated.
        inverse: `[dims / 2]`, by what positions are multiplied. It outlives calls: not in MLX's
            memory, all of which is accounted for.
        scale: of positions.
        neighbours: a pair is two neighbours (MLX calls that traditional), and not one of each half.
    """

    def __init__(self, dims: int, inverse: np.ndarray, scale: float, *, neighbours: bool) -> None:
        self.dims = dims
        self._inverse = inverse
        self._scale = scale
        self._neighbours = neighbours
        self._of: tuple[object, int] | None = None
        self._tables: tuple[mx.array, mx.array] | None = None

    def rotate(self, x: mx.array, offset: Offset) -> mx.array:
        """Rotate `[rows, heads, tokens, dims]`."""
        cosines, sines = self._tables_of(offset, x.shape[2])
        return x * cosines + self._swapped(x) * sines

    def _swapped(self, x: mx.array) -> mx.array:
        """Put the other one of its pair in the place of each number."""
        half = self.dims // 2
        if self._neighbours:
            return x.reshape(*x.shape[:-1], half, 2)[..., ::-1].reshape(x.shape)
        return mx.concatenate([x[..., half:], x[..., :half]], axis=-1)

    def _tables_of(self, offset: Offset, tokens: int) -> tuple[mx.array, mx.array]:
        """Both, for each number of a head; the sines of the first of each pair are negative."""
        of = (offset.tolist() if isinstance(offset, mx.array) else offset), tokens
        if self._tables is None or of != self._of:
            first = mx.array(offset)
            if first.size > 1:
                first = first[:, None, None]
            positions = (mx.arange(tokens, dtype=mx.float32) + first) * self._scale
            angles = positions[..., None] * mx.array(self._inverse)
            cosines, sines = mx.cos(angles), mx.sin(angles)
            # As pairs lie in a head.
            join = mx.stack if self._neighbours else mx.concatenate
            shape = *angles.shape[:-1], self.dims
            of_pairs = [cosines, cosines], [-sines, sines]
            doubled = [join(both, axis=-1).reshape(shape) for both in of_pairs]
            mx.eval(doubled)
            self._of, self._tables = of, (doubled[0], doubled[1])
        return self._tables

    def forget(self) -> None:
        """Let go of them: the call is over, and no ledger knows them."""
        self._tables = None


class _Tabled:
    """A module that looks up what it multiplies with."""

    _rotation: Rotation

    def __call__(self, x: mx.array, offset: Offset = 0) -> mx.array:
        """Rotate `[rows, heads, tokens, size]`; what is not rotated here is by MLX."""
        plain = x.ndim == 4 and x.shape[-1] == self._rotation.dims  # noqa: PLR2004
        if plain and x.dtype == mx.float32 and getattr(offset, "ndim", 0) <= 1:
            return self._rotation.rotate(x, offset)
        rotated: mx.array = super().__call__(x, offset)  # type: ignore[misc]
        return rotated


class TabledRoPE(_Tabled, RoPE):
    """By the powers of a base."""


class TabledLlama3RoPE(_Tabled, Llama3RoPE):  # type: ignore[misc]
    """By Llama 3's frequencies."""


_TABLED: dict[type, type[_Tabled]] = {RoPE: TabledRoPE, Llama3RoPE: TabledLlama3RoPE}


def bind(model: Any, *, by_table: bool) -> bool:
    """Have a model's rotary embeddings look up sines and cosines, or be MLX's.

    Returns:
        True if any changed.
    """
    changed = []
    for module in model.modules():
        own = type(module).__bases__[1] if isinstance(module, _Tabled) else type(module)
        wanted = _TABLED.get(own, own) if by_table else own
        if wanted is not type(module):
            module.__class__ = wanted
            changed.append(module)
    if by_table:
        _look_up(changed)
    return bool(changed)


def rotations(model: Any) -> list[Rotation]:
    """What a model's modules that look up have together; who calls it has them forget."""
    found = [vars(each)["_rotation"] for each in model.modules() if isinstance(each, _Tabled)]
    return list(dict.fromkeys(found))


@contextmanager
def forgetting(rotations: Sequence[Rotation]) -> Iterator[None]:
    """Have them forget when the block ends, however it does."""
    try:
        yield
    finally:
        for rotation in rotations:
            rotation.forget()


def _look_up(modules: Sequence[Any]) -> None:
    made: dict[tuple[Any, ...], Rotation] = {}
    for module in modules:
        inverse, scale = _inverse(module), getattr(module, "scale", 1.0)
        neighbours = bool(module.traditional)
        alike = module.dims, scale, neighbours, inverse.tobytes()
        new = Rotation(module.dims, inverse, scale, neighbours=neighbours)
        # A model that was bound before keeps its own.
        vars(module).setdefault("_rotation", made.setdefault(alike, new))


def _inverse(module: Any) -> np.ndarray:
    """By what a module multiplies positions, `[dims / 2]`."""
    if isinstance(module, Llama3RoPE):
        return np.array(1 / module._freqs)  # noqa: SLF001  (mlx-lm's; see the tests)
    half = module.dims // 2
    powers = mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(module.base) / half)
    return np.array(mx.exp(powers))
