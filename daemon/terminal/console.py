"""The terminal as rich knows it, where there is one."""

import sys

from rich.console import Console


def standard_error() -> Console | None:
    """Standard error, for lines that a terminal may fold; None where it is no terminal.

    NO_COLOR and TERM=dumb are heeded by rich itself.
    """
    if not sys.stderr.isatty():
        return None
    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def spinner(console: Console) -> str:
    """Name a spinner that the terminal's encoding has the characters of."""
    return "line" if console.options.ascii_only else "dots"


def moves(console: Console) -> bool:
    """Whether lines can be drawn again where they stand; not so with TERM=dumb."""
    return console.is_terminal and not console.is_dumb_terminal
