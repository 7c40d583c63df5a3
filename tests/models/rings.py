"""Where rows' tokens lie in a ring, for tests of the kernels that read one."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np


class Places(NamedTuple):
    """Where each row's tokens lie.

    Attributes:
        spans: `[rows, 2]`, the position of the first and how many there are, as kernels are told.
        seen: `[rows, 1, 1, positions]`, where they are.
    """

    spans: mx.array
    seen: mx.array


def places(rows: int, positions: int) -> Places:
    """Have the first row fill a ring, and later ones less of it, from anywhere on."""
    spans, seen = [], np.zeros((rows, positions), np.bool_)
    for row in range(rows):
        first, length = (row * 7 + positions - 3) % positions, max(1, positions // (row + 1))
        spans.append((first, length))
        seen[row, (first + np.arange(length)) % positions] = True
    return Places(mx.array(spans, mx.int32), mx.array(seen)[:, None, None])
