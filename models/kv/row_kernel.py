"""Tokens of several rows put side by side, as one kernel on CUDA.

What rows have comes in parts from several places, and to copy each part of each row of each layer
is a launch: seven newcomers of three parts each were 1,400 in a model of 32 layers, more than all
that their step computed. They also made each such step another graph for CUDA to put together.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

MOST = 16
"""Parts that a launch copies: they are arguments of the kernel, which has as many."""

_THREADS = 256  # of a block; SPLIT blocks share a head of a row
_SPLIT = 8
_PACK = 16  # bytes that a thread copies at once
_SOURCE = """
  struct alignas(sizeof(T) * Width) Pack { T x[Width]; };
  const int heads = part_0_shape[1];
  const int packs = part_0_shape[3] / Width;
  const int row = blockIdx.x / heads;
  const int head = blockIdx.x % heads;
  const T* parts[Most] = {PARTS};
  const size_t token_steps[Most] = {TOKEN_STEPS};
  const size_t steps[Most] = {STEPS};
  const int all = positions[0];
  const int start = places[3 * row];
  const int first = places[3 * row + 1];
  const int end = places[3 * row + 2];
  Pack* write = reinterpret_cast<Pack*>(arranged) + static_cast<size_t>(blockIdx.x) * all * packs;
  for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < all * packs; i += Split * blockDim.x) {
    const int position = i / packs;
    int token = position - start;
    token += token < 0 ? all : 0;
    Pack pack;
    for (int j = 0; j < Width; ++j) {
      pack.x[j] = static_cast<T>(0.0f);
    }
    for (int n = first; n < end; ++n) {
      if (token < lengths[n]) {
        const int at = (i - position * packs) * Width;
        const T* read = parts[n] + token * token_steps[n] + at * steps[n];
        if (steps[n] == 1 && reinterpret_cast<size_t>(read) % sizeof(Pack) == 0) {
          pack = *reinterpret_cast<const Pack*>(read);
        } else {
          for (int j = 0; j < Width; ++j) {
            pack.x[j] = read[j * steps[n]];
          }
        }
        break;
      }
      token -= lengths[n];
    }
    write[i] = pack;
  }
"""


class _Launch(NamedTuple):
    """Some of the rows.

    Attributes:
        rows: the first of them, and one after the last.
        places: `[rows, 3]`: the position of a row's first token, its first part, and one after
            its last.
        lengths: `[MOST]`, tokens of the parts.
    """

    rows: tuple[int, int]
    places: mx.array
    lengths: mx.array


class Arrangement:
    """Where the tokens of rows go, in each tensor of each layer.

    Args:
        lengths: for each row the tokens of its parts, which follow each other.
        starts: for each row the position of its first token. What is beyond the last position
            goes to the first ones.
        positions: that each row has.
    """

    def __init__(
        self, lengths: Sequence[Sequence[int]], starts: Sequence[int], positions: int
    ) -> None:
        self._positions = positions
        self._array = mx.array([positions])
        whole = [row if len(row) <= MOST else [sum(row)] for row in lengths]
        self._launches = [
            _launch(rows, whole, [start % positions for start in starts])
            for rows in _rows_of_launches([len(row) for row in whole])
        ]

    def arrange(self, rows: Sequence[Sequence[mx.array]]) -> mx.array:
        """Copy one tensor's tokens.

        Args:
            rows: for each row its parts, `[1, heads, tokens, size]`; one has some.

        Returns:
            `[rows, heads, positions, size]`, zero where no token goes.
        """
        parts = [
            list(row) if len(row) <= MOST else [mx.concatenate(list(row), axis=2)] for row in rows
        ]
        like = next(part for row in parts for part in row)
        found = [self._launched(launch, parts, like) for launch in self._launches]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=0)

    def _launched(
        self, launch: _Launch, rows: Sequence[Sequence[mx.array]], like: mx.array
    ) -> mx.array:
        first, end = launch.rows
        parts = [part for row in rows[first:end] for part in row]
        heads, size, width = like.shape[1], like.shape[3], _PACK // like.itemsize
        found: list[mx.array] = kernel()(
            inputs=[
                *(launch.places, launch.lengths, self._array),
                *parts,
                *[like] * (MOST - len(parts)),
            ],
            template=[
                ("T", like.dtype),
                ("Most", MOST),
                ("Split", _SPLIT),
                ("Width", 1 if size % width else width),
            ],
            grid=((end - first) * heads * _THREADS, _SPLIT, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(end - first, heads, self._positions, size)],
            output_dtypes=[like.dtype],
        )
        return found[0]


def _rows_of_launches(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Divide rows, in their order, so that each launch has no more parts than it may."""
    first = taken = 0
    for row, count in enumerate(counts):
        if taken + count > MOST:
            yield first, row
            first, taken = row, 0
        taken += count
    yield first, len(counts)


def _launch(rows: tuple[int, int], lengths: Sequence[Sequence[int]], starts: list[int]) -> _Launch:
    ends = np.cumsum([0, *[len(lengths[row]) for row in range(*rows)]])
    places = np.stack([starts[slice(*rows)], ends[:-1], ends[1:]], axis=1)
    tokens = np.zeros(MOST, np.int32)
    tokens[: ends[-1]] = [length for row in range(*rows) for length in lengths[row]]
    return _Launch(rows, mx.array(places.astype(np.int32)), mx.array(tokens))


@cache
def kernel() -> Any:
    """The kernel; made once."""
    names = [f"part_{n}" for n in range(MOST)]
    starts = ", ".join(f"{name} + head * {name}_strides[1]" for name in names)
    source = _SOURCE.replace("PARTS", starts)
    for what, axis in (("TOKEN_STEPS", 2), ("STEPS", 3)):
        steps = ", ".join(f"static_cast<size_t>({name}_strides[{axis}])" for name in names)
        source = source.replace(f"{{{what}}}", f"{{{steps}}}")
    return mx.fast.cuda_kernel(
        name="arrange",
        input_names=["places", "lengths", "positions", *names],
        output_names=["arranged"],
        source=source,
        ensure_row_contiguous=False,  # parts are slices
    )
