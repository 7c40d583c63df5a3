"""What an installation does, one step after the other, told in words before or after."""

import os
import pwd
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import ServiceError
from .program import Program
from .service_file import ServiceFile

Say = Callable[[str], None]


class Step(NamedTuple):
    """One change of this machine.

    Attributes:
        verb: what is done, and in the past tense.
        what: to what, and why.
        take: does it.
        text: what a file will hold.
    """

    verb: tuple[str, str]
    what: str
    take: Callable[[], None]
    text: str = ""


def follow(steps: Iterable[Step], say: Say) -> None:
    """Take the steps, and say of each that it is done.

    Raises:
        ServiceError: one failed; those before it are done.
    """
    for step in steps:
        try:
            step.take()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ServiceError(f"cannot {step.verb[0]} {step.what}: {reason}") from error
        say(f"{step.verb[1]} {step.what}")


def describe(steps: Iterable[Step], say: Say) -> None:
    """Say what `follow` would do."""
    for step in steps:
        say(f"would {step.verb[0]} {step.what}")
        for line in step.text.splitlines():
            say(f"    {line}".rstrip())


def write(file: ServiceFile) -> Step:
    """Write a file, at once or not at all; everybody may read it."""
    if file.is_there():
        return Step(("leave", "left"), f"{file.path}: it is as it should be", lambda: None)

    def take() -> None:
        file.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        new = file.path.with_name(f".{file.path.name}.new")
        new.write_text(file.text, encoding="utf-8")
        new.chmod(0o644)
        new.replace(file.path)

    return Step(("write", "wrote"), str(file.path), take, file.text)


def remove(path: Path) -> Step:
    """Remove a file, and a folder of drop-ins that is empty then."""

    def take() -> None:
        path.unlink()
        if path.parent.suffix == ".d":
            with suppress(OSError):  # somebody has put something else there
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
