"""What MLX's CUDA backend reads from the environment when it starts."""

import os

_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"


def count_no_cache_misses() -> None:
    """Have MLX's caches of CUDA graphs and of attention plans miss as often as they must.

    They count the misses of the whole life of a process, and raise "Cache thrashing is
    happening" in whatever is computed once there were twice as many as they hold: 800 kinds
    of graphs, or 512 lengths that a prompt was computed in. A daemon reaches any such number
    (`lru_cache.h` of MLX 0.32). Whoever set the variable keeps what they chose.
    """
    os.environ.setdefault(_CHECK, "0")
