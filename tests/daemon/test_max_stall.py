"""For how long a prompt's call may keep streams waiting, where the user does not say."""

from dataclasses import replace

import pytest

from umbel.daemon.assembly import max_stall
from umbel.daemon.config import SETTINGS, Settings
from umbel.models.load.device import CPU, CUDA, GPU, DevicePolicy


@pytest.mark.parametrize(
    ("asked", "device", "seconds"),
    [(None, CPU, 0.4), (None, GPU, 0.2), (None, CUDA, 0.2), (8.5, CPU, 0.0085), (8.5, GPU, 0.0085)],
)
def test_the_device_says_it(asked: float | None, device: DevicePolicy, seconds: float) -> None:
    """In seconds; the user's is stronger."""
    assert max_stall(Settings(max_stall_ms=asked), device) == pytest.approx(seconds)
    other = replace(device, max_stall_ms=1000.0)
    assert max_stall(Settings(max_stall_ms=asked), other) == pytest.approx(
        1.0 if asked is None else seconds
    )


def test_help_says_what_holds() -> None:
    """The words beside the setting are the devices' figures."""
    said = f"{GPU.max_stall_ms:g} on a GPU, else {CPU.max_stall_ms:g}"
    assert SETTINGS["max_stall_ms"].about.unset == said
    assert CUDA.max_stall_ms == GPU.max_stall_ms
