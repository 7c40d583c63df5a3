"""A file in a wheel of the package index, fetched with pip and kept.

pip knows the user's index, mirrors, certificates, proxies and passwords, and refuses a wheel with
another digest. It is a dependency of umbel because environments made by uv have none.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

from filelock import FileLock, Timeout

from ..errors import DownloadError, DownloadStoppedError
from .watch import Progress, Watch

_LONGEST = 1800.0  # seconds for a download
_OFTEN = 0.2  # seconds between checks for a stop
_SCRATCH = ".fetching-"
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_BROKEN = re.compile(r"after connection broken by '(.*)': ")
_CONNECTION = re.compile(r"(?:[\w.]+\()?[\"']?(?:HTTPS?Connection\w*\([^)]*\): )?")
# The kernel closes standard input when the parent ends, in any way; then pip ends too.
_PIP = """
import os, runpy, sys, threading
def end_with_parent():
    os.read(0, 1)
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
_OPTIONS = (
    *("--no-deps", "--only-binary=:all:", "--require-hashes", "--progress-bar=raw"),
    *("--no-cache-dir", "--no-input", "--disable-pip-version-check"),
)


class IndexFile(NamedTuple):
    """A file (`member`) in a wheel (`requirement`, as in `name==1.0`); digests are hexadecimal."""

    requirement: str
    wheel_sha256: str
    wheel_nbytes: int
    member: str
    sha256: str
    nbytes: int

    @property
    def name(self) -> str:
        """The file's name."""
        return self.member.rpartition("/")[2]

    def has_size(self, path: Path) -> bool:
        """True if there is a file of the right size."""
        return path.is_file() and path.stat().st_size == self.nbytes

    def is_at(self, path: Path) -> bool:
        """True if there is a file of the right content; it is read."""
        try:
            if not self.has_size(path):
                return False
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        except OSError:
            return False


def fetch(file: IndexFile, folder: Path, watch: Watch, within: float = _LONGEST) -> Path:
    """Download the wheel and keep the file in a folder, whole or not at all; return its path.

    Of several processes, one downloads and the others wait for it. Either ends `within` seconds.

    Raises:
        DownloadError: it is not available, or cannot be kept; the message says why.
    """
    path = folder / file.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=within):
            if file.is_at(path):  # another process has just fetched it
                return path
            for leftover in folder.glob(f"{_SCRATCH}*"):  # of processes that were killed
                shutil.rmtree(leftover, ignore_errors=True)
            with TemporaryDirectory(prefix=_SCRATCH, dir=folder) as scratch:
                wheel = _download(file, Path(scratch), watch, within)
                _unpack(file, wheel, path)
    except Timeout as error:
        raise DownloadError(
            f"another process has been fetching {file.name} for {within:.0f} seconds: "
            "end it, and start again"
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise DownloadError(f"cannot keep {file.name} in {folder}: {reason}") from error
    return path


def _download(file: IndexFile, scratch: Path, watch: Watch, within: float) -> Path:
    target = scratch / "wheel"
    too_late = threading.Event()
    with _start_pip(file, scratch, target) as pip:
        ends = threading.Thread(target=_end_early, args=(pip, watch, within, too_late), daemon=True)
        ends.start()
        try:
            said = _follow(file, pip, watch)
        finally:
            pip.kill()
    if watch.stop.is_set():
        raise DownloadStoppedError(f"the download of {file.requirement} was stopped")
    if pip.returncode:
        why = f"it took over {within:.0f} seconds" if too_late.is_set() else _reason(said)
        raise DownloadError(f"pip cannot download {file.requirement}: {why}")
    return next(target.iterdir())


def _end_early(
    pip: subprocess.Popen[str], watch: Watch, within: float, too_late: threading.Event
) -> None:
    """End pip when the download is stopped or takes too long."""
    end = time.monotonic() + within
    while pip.poll() is None:
        if watch.stop.wait(_OFTEN):
            pip.kill()
        elif time.monotonic() > end:
            too_late.set()
            pip.kill()


def _start_pip(file: IndexFile, scratch: Path, target: Path) -> subprocess.Popen[str]:
    wanted = scratch / "wanted.txt"
    wanted.write_text(f"{file.requirement} --hash=sha256:{file.wheel_sha256}\n")
    command = [sys.executable, "-c", _PIP, "download", *_OPTIONS]
    settled = {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_QUIET": "0", "TMPDIR": str(scratch)}
    return subprocess.Popen(  # noqa: S603  (its words are ours)
        [*command, "--dest", str(target), "--requirement", str(wanted)],
        env={**os.environ, **pip_variables(), **settled},
        cwd=scratch,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _follow(file: IndexFile, pip: subprocess.Popen[str], watch: Watch) -> list[str]:
    """Report pip's progress and return its other lines; raise DownloadError for too many bytes."""
    said = []
    for line in pip.stdout or ():
        if (found := _PROGRESS.match(line)) is None:
            said.append(line.strip())
            continue
        done, total = map(int, found.groups())
        if max(done, total) > file.wheel_nbytes:
            raise DownloadError(
                f"the package index has another file for {file.requirement}: it is larger than "
                f"{file.wheel_nbytes} bytes"
            )
        watch.report(Progress(done, file.wheel_nbytes))
    pip.wait()
    return said


def _reason(said: list[str]) -> str:
    """Find the line of pip's that says most, in a sentence's part."""
    for line in said:
        if broken := _BROKEN.search(line):
            cause = _CONNECTION.sub("", broken[1], count=1).rstrip("\"')")
            return f"the package index does not answer ({cause})"
        if "DO NOT MATCH THE HASHES" in line:
            return "the package index has another file by that name, which is not used"
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")]
    return (errors or [line for line in said if line][-1:] or ["it does not say why"])[0]


def _unpack(file: IndexFile, wheel: Path, path: Path) -> None:
    """Put the wheel's file in its place, if its content is right."""
    new = wheel.with_name(file.name)
    try:
        with ZipFile(wheel) as archive, archive.open(file.member) as member, new.open("xb") as out:
            if archive.getinfo(file.member).file_size == file.nbytes:  # which no read exceeds
                shutil.copyfileobj(member, out)
            out.flush()
            os.fsync(out.fileno())
    except (BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel.name} has no {file.member}: {error}") from error
    if not file.is_at(new):
        raise DownloadError(f"{file.member} of {wheel.name} is not the file umbel expects")
    new.replace(path)


def pip_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Translate uv's indexes for pip; empty if uv has none.

    uv's default index replaces pip's; further ones of both are used. These are variables and no
    options of a command: `ps` shows options, and an address may hold a password.
    """
    defaults, others = zip(*_sources(environment), strict=True)
    variables = {}
    if default := [*chain.from_iterable(defaults)]:
        variables["PIP_INDEX_URL"] = default[0]
    if more := [*dict.fromkeys(chain.from_iterable(others))]:
        known = environment.get("PIP_EXTRA_INDEX_URL", "").split()
        variables["PIP_EXTRA_INDEX_URL"] = " ".join([*known, *more])
    return variables


def _sources(environment: Mapping[str, str]) -> Iterator[tuple[list[str], list[str]]]:
    """Read uv's default and further indexes outside projects, the strongest source first."""

    def variables(*names: str) -> list[str]:
        words = " ".join(environment.get(name, "") for name in names).split()
        return [_address(word) for word in words]

    yield variables("UV_DEFAULT_INDEX", "UV_INDEX_URL"), variables("UV_INDEX", "UV_EXTRA_INDEX_URL")
    for file in _files(environment):
        try:
            yield _of_file(tomllib.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # uv reports errors of its own file


def _address(word: str) -> str:
    """Take the address of `name=address`; in an address alone, `:` precedes the first `=`."""
    name, equals, rest = word.partition("=")
    return rest if equals and ":" not in name and "/" not in name else word


def _files(environment: Mapping[str, str]) -> list[Path]:
    if environment.get("UV_NO_CONFIG", "0") not in ("", "0", "false"):
        return []
    if named := environment.get("UV_CONFIG_FILE"):
        return [Path(named)]
    # uv uses these folders on every Unix, macOS included.
    user = environment.get("XDG_CONFIG_HOME") or "~/.config"
    system = (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    folders = [Path(user).expanduser(), *map(Path, system)]
    return [*(folder / "uv" / "uv.toml" for folder in folders), Path("/etc/uv/uv.toml")]


def _of_file(table: dict[str, Any]) -> tuple[list[str], list[str]]:
    entries = [entry for entry in table.get("index", []) if not entry.get("explicit")]
    default = [entry["url"] for entry in entries if entry.get("default")]
    others = [entry["url"] for entry in entries if not entry.get("default")]
    old = [table["index-url"]] if table.get("index-url") else []
    return [*default, *old], [*others, *map(str, table.get("extra-index-url", []))]
