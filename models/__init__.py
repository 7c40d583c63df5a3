"""Everything that knows mlx and mlx-lm.

Importing this package prepares the process for `mlx.core`, before that is first imported: it loads
OpenBLAS in front of the reference BLAS of MLX's Linux CPU wheel, and sets MLX's folder of compiled
code and the bounds of its CUDA caches. So it must not import mlx.
"""

from .backends.blas import preload
from .backends.environment import keep_kernels, set_bounds

BLAS = preload()
"""The BLAS of MLX's matrix products on this process's CPU."""

KERNELS = keep_kernels()
"""The folder of MLX's compiled code."""


set_bounds()
