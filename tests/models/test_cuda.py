"""What is set for MLX's CUDA backend before it starts."""

import os
import subprocess
import sys

import pytest

_PRINT = "import umbel.models, os; print(os.environ['MLX_ENABLE_CACHE_THRASHING_CHECK'])"


@pytest.mark.parametrize(("chosen", "found"), [(None, "0"), ("1", "1")])
def test_no_count_of_misses(chosen: str | None, found: str) -> None:
    """A process that serves for long is not ended by a count, unless its user wants that."""
    name = "MLX_ENABLE_CACHE_THRASHING_CHECK"
    environment = {key: value for key, value in os.environ.items() if key != name}
    if chosen is not None:
        environment[name] = chosen
    done = subprocess.run(
        [sys.executable, "-c", _PRINT], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == found
