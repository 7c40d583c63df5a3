"""`umbel doctor`: what this machine gives umbel, and what to do about what it does not."""

import os
import platform
import sys
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from rich.markup import escape

from ..models import BLAS
from ..models.errors import ModelError
from ..models.load.embedded import NAME as EMBEDDED
from ..models.load.embedded import find as find_embedded
from ..models.runtime import backend, device_memory, matmul_gflops
from .client import Client, ClientError
from .config import Settings
from .sockets import MAX_PATH

Grade = Literal["ok", "warning", "problem"]

_SLOW_GFLOPS = 20.0  # the reference BLAS reaches 3, OpenBLAS on two cores 200
_SMALL_MEMORY = 4 * 2**30


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
    findings = [check() for check in _CHECKS]
    findings.append(_model(settings))
    findings += await _daemon(settings)
    return findings


def _python() -> Finding:
    return Finding("ok", "python", f"{platform.python_version()} ({sys.executable})")


def _mlx() -> Finding:
    name = backend()
    if sys.platform == "darwin" and name == "cpu":
        return Finding("warning", "mlx", "computes on the CPU", "run on Apple silicon")
    return Finding("ok", "mlx", f"computes on {name}")


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


_CHECKS: tuple[Callable[[], Finding], ...] = (_python, _mlx, _blas, _memory)


def _model(settings: Settings) -> Finding:
    if settings.model != EMBEDDED:
        return Finding("ok", "model", f"{settings.model} (loaded when the daemon starts)")
    try:
        path = find_embedded()
    except ModelError as error:
        return Finding("problem", "model", "no embedded model", str(error))
    return Finding("ok", "model", f"{EMBEDDED} ({path.stat().st_size / 2**20:.0f} MiB)")


async def _daemon(settings: Settings) -> list[Finding]:
    """Look at the socket, and at the daemon that runs there."""
    path = settings.socket_path
    if len(os.fsencode(path)) > MAX_PATH:
        return [Finding("problem", "socket", f"{path} is too long", "choose a shorter --socket")]
    if not path.exists():
        return [Finding("ok", "socket", f"{path} (no daemon runs)")]
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
