"""What MLX's CUDA backend reads from the environment when it starts."""

import os

_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"
_GRAPHS = "MLX_CUDA_GRAPH_CACHE_SIZE"
_KEPT = 2000
_PLANS = "MLX_CUDA_SDPA_CACHE_SIZE"
_PLANS_KEPT = 1000


def count_no_cache_misses() -> None:
    """Have MLX's caches of CUDA graphs and of attention plans miss as often as they must.

    They count the misses of the whole life of a process, and raise "Cache thrashing is
    happening" in whatever is computed once there were twice as many as they hold: 800 kinds
    of graphs, or 512 shapes that attention had. A daemon reaches any such number
    (`lru_cache.h` of MLX 0.32). Whoever set the variable keeps what they chose.
    """
    os.environ.setdefault(_CHECK, "0")


def keep_graphs() -> None:
    """Have MLX keep more of the CUDA graphs that it has made than 400.

    A step of a model of 32 layers is fourteen of them, and each kind of step has others: rows that
    join, prompts of one call. On an H200 one takes 1.8 ms to make and, where another one makes way
    for it, 2.1 ms to destroy: half of the time of a step that seven newcomers joined. Whoever set
    the variable keeps what they chose.
    """
    os.environ.setdefault(_GRAPHS, str(_KEPT))


def keep_plans() -> None:
    """Have MLX keep more attention plans than 256.

    Prompts of up to 32,768 tokens meet 330 of them for each kind of attention that a model has
    (`models/attention/planned.py`). A value that the user has set stays.
    """
    os.environ.setdefault(_PLANS, str(_PLANS_KEPT))
