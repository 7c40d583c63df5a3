"""The setting `backend`: a daemon that computes another device's way."""

from pathlib import Path

import pytest

from umbel.models.backends import device_name

from .running import running, spawn
from .test_several_models import ask

on_cpu = pytest.mark.skipif(device_name() != "cpu", reason="elsewhere kernels round in another way")


@on_cpu
def test_the_metal_path_gives_the_same_answers(short_path: Path, tiny_dir: Path) -> None:
    """MLX's operations alone, and what a GPU has besides: warm-up and overlap."""
    answers = []
    for backend in ("cpu", "metal"):
        with running(short_path, tiny_dir, env={"UMBEL_BACKEND": backend}) as daemon:
            replies = [daemon.post(ask("tiny")) for _ in range(2)]
            answers += [reply.json()["choices"][0]["message"]["content"] for reply in replies]
            assert ('event="warmed up"' in daemon.log()) == (backend == "metal")
    assert len(answers) == 4
    assert len(set(answers)) == 1


@on_cpu
def test_cudas_needs_cuda(short_path: Path, tiny_dir: Path) -> None:
    """A start of it ends with a sentence."""
    daemon = spawn(short_path, tiny_dir, env={"UMBEL_BACKEND": "cuda"})
    assert daemon.process.wait(60) == 1
    assert "the backend cuda needs CUDA, and MLX computes on cpu" in daemon.log()
    assert "Traceback" not in daemon.log()
