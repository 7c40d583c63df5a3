"""Programs of the system, found in PATH, run, and their answers read."""

import shlex
import shutil
import subprocess
from typing import NamedTuple

from ..errors import ServiceError

_LONGEST = 180.0  # seconds: longer than systemd lets a daemon take to stop (TimeoutStopSec)


class Answer(NamedTuple):
    """How a program ended, and what it said."""

    status: int
    text: str
    errors: str


class Program:
    """A program.

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
        """Whether the system has it."""
        return shutil.which(self.name) is not None

    def line(self, *words: str) -> str:
        """Write the command as one types it."""
        return shlex.join([self.name, *self._first, *words])

    def ask(self, *words: str) -> Answer:
        """Run it and read what it says, whatever its exit status.

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
        """Run it for what it does.

        Raises:
            ServiceError: it fails, or the system has no such program.
        """
        answer = self.ask(*words)
        if answer.status:
            said = answer.errors.strip() or answer.text.strip() or "without a word"
            raise ServiceError(f"`{self.line(*words)}` failed with status {answer.status}: {said}")

    def show(self, *words: str) -> int:
        """Run it in the terminal.

        Returns:
            Its exit status.

        Raises:
            ServiceError: the system has no such program.
        """
        return subprocess.run(self._command(*words), check=False).returncode  # noqa: S603

    def _command(self, *words: str) -> list[str]:
        path = shutil.which(self.name)
        if path is None:
            raise ServiceError(f"{self.name} is not in PATH")
        return [path, *self._first, *words]
