"""`umbel doctor`: what this machine gives umbel, and what to do about what it does not."""

import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from rich.markup import escape

from ... import __version__
from ...models import BLAS, KERNELS
from ...models.runtime import device_memory, device_name, matmul_gflops
from ..config import Settings
from ..quoting import printable
from ..terminal.sizes import age, amount
from .findings import Finding
from .install_method import InstallMethod, install_method
from .running_daemon import ask
from .serve_needs import addresses, needs, service

_SLOW_GFLOPS = 20.0  # the reference BLAS reaches 3, OpenBLAS on two cores 200
_SMALL_MEMORY = 4 * 2**30
_NVIDIA = Path("/dev/nvidiactl")
"""A file that a machine with NVIDIA GPUs has."""


async def examine(settings: Settings) -> list[Finding]:
    """Look at everything a daemon needs."""
    method = install_method()
    findings = [_umbel(method), _python(), _mlx(method, _NVIDIA), _blas(), _memory()]
    findings += needs(settings)
    findings += _stored(settings)
    running = await ask(settings.socket_path)
    findings += running.findings
    if not running.answers:
        findings += addresses(settings)
    findings += service()
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
    name = device_name()
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
    if not BLAS.fast or speed < _SLOW_GFLOPS:
        advice = BLAS.advice or "other programs may be using the processor"
        text = f"{BLAS.name}, {speed:.0f} GFLOP/s in fp32"
        return Finding("warning", "blas", text, advice)
    return Finding("ok", "blas", BLAS.name)


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


def _stored(settings: Settings) -> Iterator[Finding]:
    """Say which models have state on disk, how much, and since when it was not used."""
    from ...cachestore.disk.model_folders import stored_models  # noqa: PLC0415  (numpy, structlog)

    root = settings.disk_folder
    models = [] if root is None else stored_models(root)
    if models:
        now = time.time()
        held = (
            f"{printable(each.name)} {amount(each.nbytes)} (used {age(now - each.used)} ago)"
            for each in models
        )
        yield Finding("ok", "disk", f"{root} has state of {', '.join(held)}")


def report(findings: list[Finding]) -> Iterator[str]:
    """Write the findings as lines of rich markup."""
    colours = {"ok": "green", "warning": "yellow", "problem": "red"}
    for finding in findings:
        mark = f"[{colours[finding.grade]}]{finding.grade:8}[/]"
        yield f"{mark} {finding.subject:8} {escape(finding.text)}"
        if finding.advice:
            yield f"{'':17} → {escape(finding.advice)}"
