"""What CUDA kernels of decode steps take besides a ring: parts to merge, and the tails of prefixes.

Both are arguments, of which a kernel has as many as there can be. So its source says the same of
each, and whoever calls it fills up what is not there.
"""

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from . import tails
from .products import Segment
from .softmax_kernel import number

MOST = 4
"""Parts that what a kernel reads is merged with."""

BY_ROW, BY_HEAD = 1, 2
"""How a part's results lie: `[rows, kv_heads, group, ...]`, or `[1, kv_heads, rows * group, ...]`.
A kernel has for each where in that order those of its row and its head are, in `places`."""

_PARTS = [(f"output_{n}", f"lse_{n}") for n in range(MOST)]
PART_NAMES = [name for pair in _PARTS for name in pair]
_SEGMENTS = """  int turn = 0;
#pragma unroll 1
  for (int n = 0; n <= Tails; ++n) {
    const int count = n ? tail_lengths[row * Tails + n - 1] : spans[2 * row + 1];
    const int first = n ? 0 : spans[2 * row];
    const int positions = n ? count : keys_shape[2];
    const T* k = all_keys[n];
    const T* v = all_values[n];
    const size_t k_step = key_steps[n];
    const size_t v_step = value_steps[n];
    // Each segment begins with the warp that the last one ended before.
    const int begin = (warp + Warps - turn % Warps) % Warps;
    turn += (count + Each * Keys - 1) / (Each * Keys);
"""
TAIL_NAMES = [f"tail_{name}_{n}" for n in range(tails.MOST) for name in ("keys", "values")]


def kinds_of(others: Sequence[tuple[mx.array, mx.array]], *more: int) -> mx.array:
    """Say of each part that there may be how it lies, or 0 if there is none.

    Args:
        others: outputs of parts, and the logs of their sums.
        more: what the kernel finds behind these.
    """
    kinds = [BY_HEAD if output.shape[0] == 1 else BY_ROW for output, _ in others]
    return _numbers((*kinds, *[0] * (MOST - len(others)), *more))


def parts(others: Sequence[tuple[mx.array, mx.array]], filler: mx.array) -> list[mx.array]:
    """Parts as arguments.

    Args:
        others: as in `kinds_of`. What lies by head is as products give it: in one piece.
        filler: of the type of their outputs.
    """
    unused = (filler, number(1.0)) * (MOST - len(others))
    given = [
        array if other[0].shape[0] == 1 else mx.contiguous(array)
        for other in others
        for array in other
    ]
    return [*given, *unused]


def tail_arrays(segments: Sequence[Segment], filler: Segment) -> list[mx.array]:
    """Tails as arguments.

    Args:
        segments: `tails.MOST` at most.
        filler: of the type of their tensors.
    """
    unused = [filler] * (tails.MOST - len(segments))
    return [array for segment in [*segments, *unused] for array in segment]


def with_parts(source: str) -> str:
    """Have a kernel merge parts, which PARTS and MERGED in its source stand for."""
    tops, merged = "", ""
    for n, (output, lse) in enumerate(_PARTS):
        place = f"places[kinds[{n}]]"
        tops += f"    const float top_{n} = kinds[{n}] ? {lse}[{place}] : -INFINITY;\n"
        tops += f"    highest = fmaxf(highest, top_{n});\n"
        merged += f"    if (kinds[{n}]) {{\n"
        merged += f"      const float weight = expf(top_{n} - highest);\n"
        merged += "      all += weight;\n"
        merged += f"      weighed += weight * static_cast<float>({output}[{place} * D + i % D]);\n"
        merged += "    }\n"
    return source.replace("PARTS\n", tops).replace("MERGED\n", merged)


def with_tails(source: str) -> str:
    """Say where a kernel finds the tails: TAIL_KEYS, KEY_STEPS and so on stand for it.

    SEGMENTS stands for the begin of a loop over the ring and all of them.
    """
    source = source.replace("SEGMENTS\n", _SEGMENTS)
    for name in ("keys", "values"):
        each = [f"tail_{name}_{n}" for n in range(tails.MOST)]
        starts = ", ".join(f"{tail} + head * {tail}_strides[1]" for tail in each)
        source = source.replace(f"TAIL_{name.upper()}", starts)
        steps = ", ".join(f"static_cast<size_t>({tail}_strides[2])" for tail in each)
        source = source.replace(f"{name[:-1].upper()}_STEPS", steps)
    return source


@cache
def _numbers(values: tuple[int, ...]) -> mx.array:
    """As `number`."""
    return mx.array(values, mx.int32)
