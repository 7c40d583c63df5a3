"""Everything that knows mlx and mlx-lm.

Importing this package settles what must be settled before `mlx.core` is first imported: it
puts OpenBLAS in front of the reference BLAS that MLX's Linux CPU wheel links, gives MLX a folder of
this user's own for compiled code, takes back a bound that would end a CUDA daemon, and has MLX keep
more graphs and plans there. It must therefore stay free of imports that reach mlx.
"""

from .backends.blas import preload
from .backends.environment import keep_kernels, set_bounds

BLAS = preload()
"""What stands behind MLX's matrix products on the CPU of this process."""

KERNELS = keep_kernels()
"""Where MLX's compiled code lies."""

set_bounds()
