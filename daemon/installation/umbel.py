"""Which umbel a service runs: the one that runs now."""

import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

_PACKAGE = __package__.partition(".")[0]


class Umbel(NamedTuple):
    """An installed umbel.

    Attributes:
        command: what starts the daemon; the program is an absolute path.
        folders: where its code and Python's are.
    """

    command: list[str]
    folders: list[Path]


def running_umbel(called: str = sys.argv[0]) -> Umbel:
    """Find the umbel that runs now.

    Args:
        called: how this process's program was called.
    """
    program = shutil.which(called)
    if Path(called).name == "umbel" and program is not None:
        path = Path(program)
        # The last link stays: it is what an update of umbel moves.
        command = [str(path.parent.resolve() / path.name), "serve"]
    else:
        command = [sys.executable, "-m", _PACKAGE, "serve"]
    folders = [Path(command[0]), Path(sys.prefix), Path(sys.base_prefix)]
    return Umbel(command, [folder.resolve() for folder in folders])


def shipped(*names: str) -> str:
    """Read a file that umbel ships, such as a unit file."""
    return files(_PACKAGE).joinpath(*names).read_text(encoding="utf-8")
