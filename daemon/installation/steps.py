"""Parts of an installation: programs of the system, files with a seal, and steps in words."""

import hashlib
import os
import pwd
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import ServiceError

_LONGEST = 180.0  # seconds: longer than systemd lets a daemon take to stop (TimeoutStopSec)
_SEAL = re.compile(
    r"^.*written by `umbel service install`, digest ([0-9a-f]{64})\b.*\n", re.MULTILINE
)

Say = Callable[[str], None]


class Answer(NamedTuple):
    """Exit status and output of a program."""

    status: int
    text: str
    errors: str


class Program:
    """A program in PATH.

    Args:
        name: in PATH.
        first: words that stand before all others.
        longest: seconds that it may take to answer.
    """

    def __init__(self, name: str, *first: str, longest: float = _LONGEST) -> None:
        self.name = name
        self._first = first
        self._longest = longest

    def is_there(self) -> bool:
        """Return True if the system has it."""
        return shutil.which(self.name) is not None

    def line(self, *words: str) -> str:
        """Write the command as one types it."""
        return shlex.join([self.name, *self._first, *words])

    def ask(self, *words: str) -> Answer:
        """Run it and read its output, whatever its exit status.

        Raises:
            ServiceError: the system has no such program, or it takes too long.
        """
        try:
            done = subprocess.run(  # noqa: S603  (its words are ours)
                self._command(*words),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=self._longest,
            )
        except subprocess.TimeoutExpired as error:
            raise ServiceError(
                f"`{self.line(*words)}` did not end within {self._longest:g} seconds, and was "
                "ended; what it asked for may still be done: see `umbel service status`"
            ) from error
        return Answer(done.returncode, done.stdout, done.stderr)

    def do(self, *words: str) -> None:
        """Run it for its effect.

        Raises:
            ServiceError: it fails, or the system has no such program.
        """
        answer = self.ask(*words)
        if answer.status:
            output = answer.errors.strip() or answer.text.strip() or "no output"
            raise ServiceError(
                f"`{self.line(*words)}` failed with status {answer.status}: {output}"
            )

    def show(self, *words: str) -> int:
        """Run it in the terminal, and return its exit status.

        Raises:
            ServiceError: the system has no such program.
        """
        return subprocess.run(self._command(*words), check=False).returncode  # noqa: S603

    def _command(self, *words: str) -> list[str]:
        path = shutil.which(self.name)
        if path is None:
            raise ServiceError(f"{self.name} is not in PATH")
        return [path, *self._first, *words]


class ServiceFile(NamedTuple):
    """A file as it should be. Its text has a seal: a digest of all other lines."""

    path: Path
    text: str

    def is_there(self) -> bool:
        """Return True if the file has this text already."""
        return _text_of(self.path) == self.text

    def is_outdated(self) -> bool:
        """Return True if the file has another text."""
        return _text_of(self.path) not in (None, self.text)


def seal(text: str, *, after: int = 0, comment: str = "# {}") -> str:
    """Add the line that tells an installed file from an edited one.

    Args:
        text: of the file, with a final newline.
        after: lines that must stand before the seal.
        comment: a comment of the format, with {} in the place of its words.
    """
    words = f"written by `umbel service install`, digest {_digest(text)}"
    lines = text.splitlines(keepends=True)
    lines.insert(after, comment.format(words) + "\n")
    return "".join(lines)


def refuse_edited(paths: Iterable[Path]) -> None:
    """Refuse files that differ from their seal, or have none.

    Raises:
        ServiceError: it names the first such file.
    """
    for path in paths:
        text = _text_of(path)
        if text is None:
            continue
        found = _SEAL.search(text)
        if found is None or found[1] != _digest(_SEAL.sub("", text, count=1)):
            raise ServiceError(
                f"{path} was changed, or is not from `umbel service install`; "
                "keep what you need of it, and use --force"
            )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ServiceError(f"cannot read {path}: {error.strerror}") from error


class Step(NamedTuple):
    """One change of this machine.

    Attributes:
        verb: in the infinitive, and in the past tense.
        words: the object of the verb, and the reason.
        take: does it.
        text: of the file that is written.
    """

    verb: tuple[str, str]
    words: str
    take: Callable[[], None]
    text: str = ""


def follow(steps: Iterable[Step], say: Say) -> None:
    """Take the steps, and report each.

    Raises:
        ServiceError: one failed; those before it are done.
    """
    for step in steps:
        try:
            step.take()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ServiceError(f"cannot {step.verb[0]} {step.words}: {reason}") from error
        say(f"{step.verb[1]} {step.words}")


def describe(steps: Iterable[Step], say: Say) -> None:
    """Say what `follow` would do."""
    for step in steps:
        say(f"would {step.verb[0]} {step.words}")
        for line in step.text.splitlines():
            say(f"    {line}".rstrip())


def write(file: ServiceFile) -> Step:
    """Write a file atomically; all users may read it."""
    if file.is_there():
        return Step(("leave", "left"), f"{file.path}: it is up to date", lambda: None)

    def take() -> None:
        file.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        new = file.path.with_name(f".{file.path.name}.new")
        new.write_text(file.text, encoding="utf-8")
        new.chmod(0o644)
        new.replace(file.path)

    return Step(("write", "wrote"), str(file.path), take, file.text)


def remove(path: Path) -> Step:
    """Remove a file, and its folder if that held only this drop-in."""

    def take() -> None:
        path.unlink()
        if path.parent.suffix == ".d":
            with suppress(OSError):  # other drop-ins are there
                path.parent.rmdir()

    return Step(("remove", "removed"), str(path), take)


def folder(path: Path, owner: pwd.struct_passwd) -> Step:
    """Make a folder that only its owner may enter, and the missing ones above it."""

    def take() -> None:
        for each in [*reversed(path.parents), path]:
            if not each.exists():
                each.mkdir(mode=0o700)
                os.chown(each, owner.pw_uid, owner.pw_gid)

    if path.is_dir():
        return Step(("leave", "left"), f"{path}: it is there", lambda: None)
    return Step(("make", "made"), str(path), take)


def command(program: Program, *words: str, why: str) -> Step:
    """Run a program."""
    return Step(("run", "ran"), f"{program.line(*words)}: {why}", lambda: program.do(*words))
