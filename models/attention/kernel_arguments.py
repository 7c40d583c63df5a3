"""Arguments of CUDA kernels of decode steps: a ring of own tokens, and parts to merge.

Parts are arguments, of which a kernel has as many as there can be. So its source says the same of
each, and a caller fills up what is not there.
"""

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from .softmax_kernel import number

MAX_PARTS = 8
"""Parts of attention that a kernel merges with what it computes."""

BY_ROW, BY_HEAD = 1, 2
"""How a part's results lie: `[rows, kv_heads, group, ...]`, or `[1, kv_heads, rows * group, ...]`.
A kernel has for each where in that order those of its row and its head are, in `places`."""

_PARTS = [(f"output_{n}", f"lse_{n}") for n in range(MAX_PARTS)]
PART_NAMES = [name for pair in _PARTS for name in pair]
RING = """  const int first = spans[2 * row];
  const int count = spans[2 * row + 1];
  const int positions = keys_shape[2];
  const int begin = warp;
"""
"""Where a row's own tokens lie."""


def kinds_of(others: Sequence[tuple[mx.array, mx.array]], *more: int) -> mx.array:
    """Say of each part that there may be how it lies, or 0 if there is none.

    Args:
        others: outputs of parts, and the logs of their sums.
        more: what the kernel finds behind these.
    """
    kinds = [BY_HEAD if output.shape[0] == 1 else BY_ROW for output, _ in others]
    return _numbers((*kinds, *[0] * (MAX_PARTS - len(others)), *more))


def parts(others: Sequence[tuple[mx.array, mx.array]], filler: mx.array) -> list[mx.array]:
    """Parts as arguments.

    Args:
        others: as in `kinds_of`. A part that lies by head is contiguous, as products give it.
        filler: of the type of their outputs.
    """
    unused = (filler, number(1.0)) * (MAX_PARTS - len(others))
    given = [
        array if other[0].shape[0] == 1 else mx.contiguous(array)
        for other in others
        for array in other
    ]
    return [*given, *unused]


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


@cache
def _numbers(values: tuple[int, ...]) -> mx.array:
    """As `number`."""
    return mx.array(values, mx.int32)
