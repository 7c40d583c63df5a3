"""What tests of single kernels have in common."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .cuda_emulator import EmulatedKernel, emulated


@pytest.fixture
def kernels(kernel_folder: Path) -> Iterator[list[EmulatedKernel]]:
    """Have CUDA kernels run on the CPU; gives those that are made."""
    with emulated(kernel_folder) as made:
        yield made
