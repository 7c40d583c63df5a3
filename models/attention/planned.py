"""Attention of prompts where a kernel is planned for each shape that it meets.

On CUDA MLX has cuDNN plan attention for the exact numbers of queries and keys, and for how they lie
in memory. To make a plan takes the host a tenth of a second; what it runs takes microseconds
(`scaled_dot_product_attention.cpp` of MLX 0.32). Nearly every chunk of a prompt has another number
of keys. So queries and keys are padded to one of few sizes, and lie in one piece. The plans of
these sizes can be made before they are needed: a warm-up notes of what kind attention is (`noted`),
and computes it once in each of the `shapes_of` longer prompts.

One that decodes alone is read by cuDNN, too, which has a kernel for each of a few ranges of keys.
To compile one takes half a second, to plan it for other keys 30 ms: hence the `rooms_of` caches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx

from ..memory_profile import GROWTH

LARGEST = 128
"""Size of the largest heads for which cuDNN has a kernel; MLX computes others by products."""
TYPES = {mx.float16, mx.bfloat16}
"""Of numbers for which it has one."""
_STEP = 512
"""Tokens: a chunk attends for fewer than so many in vain, and 8,000 tokens have 16 such sizes."""


class Shape(NamedTuple):
    """For what a kernel is planned.

    Attributes:
        queries: how many.
        keys: how many, of which the last are the queries' own.
    """

    queries: int
    keys: int


class Kind(NamedTuple):
    """What besides a shape a kernel is planned for: what layers of a model have in common.

    Attributes:
        rows: sequences.
        heads: of queries.
        kv_heads: of keys and values.
        size: of a query and a key.
        value_size: of a value.
        dtype: of all of them.
        sinks: of what type sinks are; None where there are none.
    """

    rows: int
    heads: int
    kv_heads: int
    size: int
    value_size: int
    dtype: mx.Dtype
    sinks: mx.Dtype | None

    @property
    def is_planned(self) -> bool:
        """Whether there is a kernel that is planned; what products compute is not."""
        sizes = (self.size, self.value_size)
        return self.dtype in TYPES and all(n <= LARGEST and n % 8 == 0 for n in sizes)

    def nbytes(self, shape: Shape) -> int:
        """Bytes of the tensors that attention in a shape reads and makes."""
        a_query = self.heads * (self.size + self.value_size)
        a_key = self.kv_heads * (self.size + self.value_size)
        return self.rows * (shape.queries * a_query + shape.keys * a_key) * self.dtype.size

    def compute(self, shape: Shape) -> mx.array:
        """Attention in this shape, of zeros; not computed yet."""
        return mx.fast.scaled_dot_product_attention(
            self._zeros(self.heads, shape.queries, self.size),
            self._zeros(self.kv_heads, shape.keys, self.size),
            self._zeros(self.kv_heads, shape.keys, self.value_size),
            scale=1.0,
            mask="causal",
            sinks=self._sinks(),
        )

    def decode(self, room: int) -> None:
        """Compute attention of one query, where a cache has room for so many keys.

        MLX asks cuDNN where the cache is the whole of its buffer: one that was freed and is larger
        must not be taken for it.
        """
        mx.clear_cache()
        held = [self._zeros(self.kv_heads, room, size) for size in (self.size, self.value_size)]
        mx.eval(held)
        keys, values = (tensor[..., :-1, :] for tensor in held)
        query = self._zeros(self.heads, 1, self.size)
        sinks = self._sinks()
        mx.eval(mx.fast.scaled_dot_product_attention(query, keys, values, scale=1.0, sinks=sinks))

    def _zeros(self, heads: int, tokens: int, size: int) -> mx.array:
        return mx.zeros((self.rows, heads, tokens, size), self.dtype)

    def _sinks(self) -> mx.array | None:
        return None if self.sinks is None else mx.zeros((self.heads,), self.sinks)


_listening: list[set[Kind]] = []


@contextmanager
def noted() -> Iterator[set[Kind]]:
    """Note the kinds of attention that are computed until the block ends."""
    kinds = set[Kind]()
    _listening.append(kinds)
    try:
        yield kinds
    finally:
        _listening.pop()


def shape_of(count: int, held: int) -> Shape:
    """In which shape so many queries are computed that look at so many keys, their own included."""
    keys = _size(held)
    return Shape(_rounded(count + keys - held, keys), keys)


def shapes_of(chunk: int, longest: int, conversation: int = 0) -> list[Shape]:
    """All shapes that chunks of prompts have, and what turns add, those of the fewest keys first.

    Args:
        chunk: tokens of a prompt that are computed at once.
        longest: tokens of the longest prompt.
        conversation: of the longest one that turns add few to: no more than a step.
    """
    few = [Shape(1 << n, 1 << n) for n in range(1, (_STEP - 1).bit_length())]
    most = _rounded(chunk + _STEP - 1, _STEP)
    many = [
        Shape(queries, keys)
        for keys in range(_STEP, _size(longest) + 1, _STEP)
        for queries in range(_STEP, min(most, keys) + 1, _STEP)
    ]
    turns = [
        Shape(queries, keys)
        for keys in range(_size(longest) + _STEP, _size(conversation) + 1, _STEP)
        for queries in (_STEP, 2 * _STEP)
    ]
    return [*[shape for shape in few if shape.keys <= _size(longest)], *many, *turns]


def rooms_of(longest: int) -> list[int]:
    """Sizes of caches that meet all kernels by which one that decodes alone is read.

    The kernels are met, and not the plans: a query that lies otherwise in memory has its own. On an
    H200, 32 heads of 128 meet another kernel from 768, 1,024, 2,048 and 4,096 keys on, and none up
    to 34,000 besides. MLX asks cuDNN where a cache's room is a multiple of 256, by which mlx-lm's
    grow, and as many keys are held.

    Args:
        longest: tokens of the longest conversation.
    """
    most = -(-longest // GROWTH)  # a cache has room to grow
    sizes = sorted({size for n in range(most.bit_length()) for size in (1 << n, 3 << n >> 1)})
    return [GROWTH * size for size in sizes if 1 < size <= most]


def attend_causally(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None
) -> mx.array:
    """Compute causal attention by MLX's kernel, in one of few shapes.

    As many queries as keys are added at the end: the last query still is the last key's, so that
    the kernel's own mask holds, and no query that counts sees a key that was added. What queries
    still lack of a multiple of the step is added before them.

    Args:
        queries: `[B, heads, T, size]`.
        keys: `[B, kv_heads, N, size]`, of which the last T are the queries' own.
        values: likewise.
        scale: of the scores.
        sinks: `[heads]`, or None.

    Returns:
        `[B, heads, T, size of a value]`.
    """
    rows, heads, count, size = queries.shape
    for kinds in _listening:
        kept = None if sinks is None else sinks.dtype
        kinds.add(Kind(rows, heads, keys.shape[1], size, values.shape[3], queries.dtype, kept))
    shape = shape_of(count, keys.shape[2])
    behind = shape.keys - keys.shape[2]
    before = shape.queries - count - behind
    attended = mx.fast.scaled_dot_product_attention(
        _padded(queries, before, behind),
        _padded(keys, 0, behind),
        _padded(values, 0, behind),
        scale=scale,
        mask="causal",
        sinks=sinks,
    )
    return attended[:, :, before : before + count]


def _size(count: int) -> int:
    """Round up to a power of two, or to a multiple of the step."""
    return 1 << (count - 1).bit_length() if count < _STEP else -(-count // _STEP) * _STEP


def _rounded(count: int, keys: int) -> int:
    """Round queries up to a multiple of the step, or of all keys where these are fewer."""
    step = min(_STEP, keys)
    return -(-count // step) * step


def _padded(array: mx.array, before: int, behind: int) -> mx.array:
    if not before + behind:
        return mx.contiguous(array)  # as what is padded is
    return mx.pad(array, [(0, 0), (0, 0), (before, behind), (0, 0)])
