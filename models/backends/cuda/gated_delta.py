"""The gated delta rule of recurrent layers, as one kernel on CUDA.

mlx-lm has a kernel for Metal. Elsewhere it launches a dozen operations for each token and layer: a
prompt of 8,000 tokens takes half a minute on a fast GPU (24 such layers).

The rule: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
2024; with a gate for each channel: Kimi Team, "Kimi Linear", 2025.
"""

from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.models import gated_delta

TYPES = (mx.bfloat16, mx.float16, mx.float32)
WARP = 32
_theirs = gated_delta.gated_delta_update
_LANES = 4  # threads of a row of the state
_PACK = 8  # elements that a thread reads at once
_BLOCK = 128  # threads
_MOST = 256  # elements of a row: each thread holds a quarter of them twice, in registers
_INPUTS = ["q", "k", "v", "g", "beta", "state"]

_SOURCE = """
  constexpr int own = Dk / Lanes;
  struct alignas(16) Pack { T x[Width]; };
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  const int row = thread / Lanes;
  const int lane = thread % Lanes;
  if (row >= Dv) {
    return;
  }
  const int head = blockIdx.y % Hv;
  const int key_head = head / (Hv / Hk);
  const int tokens = v_shape[1];
  const size_t first = (static_cast<size_t>(blockIdx.y) * Dv + row) * Dk + lane * own;
  float held[own];
  for (int i = 0; i < own; ++i) {
    held[i] = state[first + i];
  }
  for (int t = 0; t < tokens; ++t) {
    const size_t token = static_cast<size_t>(blockIdx.y / Hv) * tokens + t;
    const size_t place = token * Hv + head;
    const size_t key = (token * Hk + key_head) * Dk + lane * own;
    if (SKIPS) {
      if (lane == 0) {
        y[place * Dv + row] = static_cast<T>(0.0f);
      }
      continue;
    }
    const Pack* k_packs = reinterpret_cast<const Pack*>(k + key);
    const Pack* q_packs = reinterpret_cast<const Pack*>(q + key);
    float keys[own];
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < own; ++i) {
      keys[i] = static_cast<float>(k_packs[i / Width].x[i % Width]);
      held[i] *= ByChannel ? g[place * Dk + lane * own + i] : g[place];
      sums[i % 4] += held[i] * keys[i];
    }
    float known = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int other = 1; other < Lanes; other *= 2) {
      known += __shfl_xor_sync(0xffffffffu, known, other);
    }
    const float value = static_cast<float>(v[place * Dv + row]);
    const float delta = (value - known) * static_cast<float>(beta[place]);
    float outs[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < own; ++i) {
      held[i] += keys[i] * delta;
      outs[i % 4] += held[i] * static_cast<float>(q_packs[i / Width].x[i % Width]);
    }
    float out = (outs[0] + outs[1]) + (outs[2] + outs[3]);
    for (int other = 1; other < Lanes; other *= 2) {
      out += __shfl_xor_sync(0xffffffffu, out, other);
    }
    if (lane == 0) {
      y[place * Dv + row] = static_cast<T>(out);
    }
  }
  for (int i = 0; i < own; ++i) {
    new_state[first + i] = held[i];
  }
"""


def update(  # noqa: PLR0917  (mlx-lm's order)
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,  # noqa: N803  (mlx-lm's names)
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """Compute the rule as mlx-lm's `gated_delta_update` does; by the kernel if that can.

    Args:
        q: `[rows, tokens, key_heads, key_size]`, normalised and scaled.
        k: likewise, normalised.
        v: `[rows, tokens, heads, value_size]`.
        a: `[rows, tokens, heads]` or `[..., key_size]`, of the gate.
        b: `[rows, tokens, heads]`, of the written values.
        A_log: of the gate.
        dt_bias: of the gate.
        state: `[rows, heads, value_size, key_size]` in fp32; None for zeros.
        mask: `[rows, tokens]`; a masked token does not change the state.
        use_kernel: False where a gradient is wanted.
        lower_bound: of the gate's logarithm.
        allow_neg_eigval: written values count twice.


    Returns:
        `[rows, tokens, heads, value_size]` in `q`'s type, and the new state.
    """
    if not (use_kernel and _fits(q, k, v)):
        own: tuple[mx.array, mx.array] = _theirs(
            *(q, k, v, a, b, A_log, dt_bias, state, mask),
            use_kernel=use_kernel,
            lower_bound=lower_bound,
            allow_neg_eigval=allow_neg_eigval,
        )
        return own
    beta = mx.sigmoid(b)
    if allow_neg_eigval:
        beta = beta * 2.0
    if lower_bound is None:
        g = gated_delta.compute_g(A_log, a, dt_bias)
    else:
        g = gated_delta.compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
    if state is None:
        state = mx.zeros((q.shape[0], *v.shape[2:], q.shape[3]), mx.float32)
    return _run(q, k, v, g, beta, state, mask)


def _fits(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """True if the kernel computes these shapes and types: whole packs a thread, and whole warps."""
    packs = k.shape[3] % (_LANES * _PACK) == 0 and k.shape[3] <= _MOST
    warps = v.shape[3] * _LANES % WARP == 0
    return packs and warps and q.dtype == k.dtype == v.dtype and q.dtype in TYPES


def _run(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None,
) -> tuple[mx.array, mx.array]:
    rows, _, key_heads, key_size = k.shape
    heads, value_size = v.shape[2:]
    threads = _LANES * value_size
    y, new_state = kernel(mask is not None)(
        inputs=[q, k, v, g.astype(mx.float32), beta, state, *([] if mask is None else [mask])],
        template=[
            ("T", q.dtype),
            ("Dk", key_size),
            ("Dv", value_size),
            ("Hk", key_heads),
            ("Hv", heads),
            ("Lanes", _LANES),
            ("Width", _PACK),
            ("ByChannel", g.ndim == v.ndim),
        ],
        grid=(threads, rows * heads, 1),
        threadgroup=(min(_BLOCK, threads), 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, mx.float32],
    )
    return y, new_state


@cache
def kernel(masked: bool) -> Any:  # noqa: FBT001
    """The kernel; made once, as MLX compiles it once for each shape of state."""
    return mx.fast.cuda_kernel(
        name="gated_delta" + "_masked" * masked,
        input_names=[*_INPUTS, *(["mask"] if masked else [])],
        output_names=["y", "new_state"],
        source=_SOURCE.replace("SKIPS", "!mask[token]" if masked else "false"),
    )
