"""For how long a prompt's call may keep streams waiting, where the user does not say."""

from dataclasses import replace

import pytest

from umbel.daemon.config import SETTINGS, Settings
from umbel.daemon.models.assembly import max_stall
from umbel.models.backends import Limits
from umbel.models.backends.base import METAL
from umbel.models.backends.cpu import CPU
from umbel.models.backends.cuda import CUDA


@pytest.mark.parametrize(
    ("asked", "limits", "seconds"),
    [
        *((None, CPU.limits, 0.4), (None, METAL.limits, 0.2), (None, CUDA.limits, 0.2)),
        *((8.5, CPU.limits, 0.0085), (8.5, METAL.limits, 0.0085)),
    ],
)
def test_the_device_says_it(asked: float | None, limits: Limits, seconds: float) -> None:
    """In seconds; the user's is stronger."""
    assert max_stall(Settings(max_stall_ms=asked), limits) == pytest.approx(seconds)
    other = replace(limits, max_stall=1.0)
    assert max_stall(Settings(max_stall_ms=asked), other) == pytest.approx(
        1.0 if asked is None else seconds
    )


def test_help_says_what_holds() -> None:
    """The words beside the setting are the devices' figures."""
    said = f"{1000 * METAL.limits.max_stall:g} on a GPU, else {1000 * CPU.limits.max_stall:g}"
    assert SETTINGS["max_stall_ms"].about.unset == said
    assert CUDA.limits.max_stall == METAL.limits.max_stall
