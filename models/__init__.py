"""Everything that knows mlx and mlx-lm.

Importing this package puts OpenBLAS in front of the reference BLAS that MLX's Linux CPU
wheel links, which works only before `mlx.core` is first imported. It must therefore stay
free of imports that reach mlx.
"""

from .blas import preload

BLAS = preload()
"""What stands behind MLX's matrix products on the CPU of this process."""
