"""The gated delta rule in chunks of tokens, as products of matrices.

mlx-lm goes from token to token, with a dozen small operations for each. On a CPU these take all the
time, while products are fast. So what the tokens of a chunk write is found at once, by the inverse
of a triangular matrix, and only chunks follow each other.

The form: Yang, Wang, Zhang, Shen and Kim, "Parallelizing Linear Transformers with the Delta Rule
over Sequence Length", 2024; with gates: Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024;
with a gate for each channel: Kimi Team, "Kimi Linear", 2025.

What decays from one token to another is a product of the gates between them. The papers divide
products from the chunk's first token on, which underflow, or subtract sums of logarithms, which
cancel. Here a chunk is halved again and again: of two tokens in different halves, the later one has
the product from the middle on, and the earlier one that up to the middle. No such product is above
1, and none has a gate in it that does not lie between the two. So gates may be as small as they
like, and 0.
"""

from typing import NamedTuple

import mlx.core as mx

CHUNK = 32
"""Tokens of a chunk: a power of two. Of 64 it is as fast, and a short prompt is filled up more."""

SPAN = 4 * CHUNK
"""Tokens that are prepared at once, and waited for. More take more memory, and are no faster."""


class _Chunks(NamedTuple):
    """What is known of chunks before the state is: `[rows, heads, chunks, ...]`.

    `C` are a chunk's tokens, `K` and `V` the sizes of keys and values, and `G` is `K` or 1.

    Attributes:
        reads: `[2C, K]`, what reads the state: for what is written, and for what comes out.
        values: `[C, V]`, what would be written if the state were 0.
        inner: `[C, C]`, by which tokens read what the chunk writes.
        keys: `[C, K]`, with what is left of them when the chunk ends.
        left: `[1, G]`, what is left of the state then.
    """

    reads: mx.array
    values: mx.array
    inner: mx.array
    keys: mx.array
    left: mx.array


def chunked_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Compute the rule, in fp32. It waits for each span, so that no compiled function may call it.

    Args:
        q: `[rows, tokens, key_heads, key_size]`, normalised and scaled.
        k: likewise, normalised.
        v: `[rows, tokens, heads, value_size]`.
        g: gates from 0 to 1: `[rows, tokens, heads]` or `[..., key_size]`.
        beta: `[rows, tokens, heads]`, how much is written, from 0 to 2.
        state: `[rows, heads, value_size, key_size]`.
        mask: `[rows, tokens]`; a token that is masked leaves the state as it is, and what comes out
            for it means nothing.

    Returns:
        `[rows, tokens, heads, value_size]` in `q`'s type, and the new state.
    """
    beta, g = beta[..., None], g if g.ndim == v.ndim else g[..., None]
    if mask is not None:
        seen = mask[..., None, None]
        k, v, beta = (mx.where(seen, x, 0.0) for x in (k, v, beta))
        g = mx.where(seen, g, 1.0)
    tokens, found = q.shape[1], []
    for start in range(0, tokens, SPAN):
        span = (x[:, start : start + SPAN] for x in (q, k, v, beta, g))
        y, state = _follow(_prepare(*span), state)
        found.append(y.swapaxes(1, 2)[:, : tokens - start].astype(q.dtype))
        if start + SPAN < tokens:
            mx.eval(found, state)
    return mx.concatenate(found, axis=1), state


def _prepare(q: mx.array, k: mx.array, v: mx.array, beta: mx.array, g: mx.array) -> _Chunks:
    """Compute all that needs no state, of all chunks of a span at once."""
    heads, size = v.shape[2], min(CHUNK, 1 << (v.shape[1] - 1).bit_length())
    q, k, v, beta = (_cut(x, heads, size) for x in (q, k, v, beta))
    g = _cut(g, heads, size, fill=1.0)
    written, decay = k * beta, mx.cumprod(g, axis=-2)
    inverse, inner = _triangles(q, k, written, g)
    return _Chunks(
        reads=mx.concatenate([inverse @ (written * decay), q * decay], axis=-2),
        values=inverse @ (v * beta),
        inner=inner,
        keys=k * _after(g),
        left=decay[..., -1:, :],
    )


def _cut(x: mx.array, heads: int, size: int, fill: float = 0.0) -> mx.array:
    """Cut tokens into chunks of one size: `[rows, heads, chunks, size, ...]`, in fp32.

    What the last one lacks is filled with tokens that change nothing.
    """
    x = x.astype(mx.float32).swapaxes(1, 2)
    x = mx.repeat(x, heads // x.shape[1], axis=1)
    short = -x.shape[2] % size
    x = mx.pad(x, [(0, 0), (0, 0), (0, short), (0, 0)], constant_values=fill)
    return x.reshape(*x.shape[:2], -1, size, x.shape[3])


def _triangles(
    q: mx.array, k: mx.array, written: mx.array, g: mx.array
) -> tuple[mx.array, mx.array]:
    """Make two lower triangles `[..., C, C]` of each chunk, from single tokens upwards.

    Returns:
        The inverse of 1 and what tokens that write know of each other, and what queries read.
    """
    *chunks, size, _ = k.shape
    inverse, inner = mx.ones((*chunks, size, 1, 1)), (q * k).sum(axis=-1)[..., None, None]
    half = 1
    while half < size:
        pairs = (*chunks, size // (2 * half), 2, half, -1)
        queries, keys, writers, gates = (x.reshape(pairs) for x in (q, k, written, g))
        decay = mx.cumprod(gates[..., 1, :, :], axis=-2)
        early = (keys[..., 0, :, :] * _after(gates[..., 0, :, :])).swapaxes(-1, -2)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        known = (writers[..., 1, :, :] * decay) @ early
        inverse = _joined(first, -(second @ known @ first), second)
        read = (queries[..., 1, :, :] * decay) @ early
        inner = _joined(inner[..., 0::2, :, :], read, inner[..., 1::2, :, :])
        half *= 2
    return inverse[..., 0, :, :], inner[..., 0, :, :]


def _after(g: mx.array) -> mx.array:
    """The product of all gates after each token, `[..., tokens, G]`."""
    return mx.cumprod(g, axis=-2, reverse=True, inclusive=False)


def _joined(first: mx.array, below: mx.array, second: mx.array) -> mx.array:
    """Put triangles on the diagonal of one of twice the size."""
    upper = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
    return mx.concatenate([upper, mx.concatenate([below, second], axis=-1)], axis=-2)


def _follow(chunks: _Chunks, state: mx.array) -> tuple[mx.array, mx.array]:
    """Go from chunk to chunk; returns `[rows, heads, tokens, V]`, and the state after them."""
    found = []
    for i in range(chunks.values.shape[2]):
        reads, values, inner, keys, left = (x[:, :, i] for x in chunks)
        size = values.shape[2]
        read = reads @ state.swapaxes(-1, -2)
        written = values - read[..., :size, :]
        found.append(read[..., size:, :] + inner @ written)
        state = state * left + written.swapaxes(-1, -2) @ keys
    return mx.concatenate(found, axis=2), state
