"""What is set for MLX's CUDA backend before it starts."""

import os
import subprocess
import sys

import pytest

_PRINT = "import umbel.models, os, sys; print(os.environ[sys.argv[1]])"
_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"
_GRAPHS = "MLX_CUDA_GRAPH_CACHE_SIZE"
_PLANS = "MLX_CUDA_SDPA_CACHE_SIZE"


@pytest.mark.parametrize(
    ("name", "chosen", "found"),
    [
        *((_CHECK, None, "0"), (_CHECK, "1", "1")),
        *((_GRAPHS, None, "2000"), (_GRAPHS, "400", "400")),
        *((_PLANS, None, "1000"), (_PLANS, "256", "256")),
    ],
)
def test_what_mlx_reads(name: str, chosen: str | None, found: str) -> None:
    """A process is not ended by a count of misses, and has few; unless its user wants that."""
    environment = {key: value for key, value in os.environ.items() if key != name}
    if chosen is not None:
        environment[name] = chosen
    command = [sys.executable, "-c", _PRINT, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found
