"""Fixtures of tests of single kernels.

Nothing here imports MLX before tests are collected, as in `tests/conftest.py`.
"""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .cuda_emulator import EmulatedKernel


@pytest.fixture
def kernels(kernel_folder: "Path") -> "Iterator[list[EmulatedKernel]]":
    """Run CUDA kernels on the CPU; yields those that are made."""
    from .cuda_emulator import emulated  # noqa: PLC0415  (it imports MLX)

    with emulated(kernel_folder) as made:
        yield made
