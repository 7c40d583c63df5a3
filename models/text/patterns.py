"""Regular expressions and choices, as a grammar's terminals."""

import llguidance

from ..errors import GrammarError
from .lark import Lark

_MOST_OPTIONS = 10_000
_LONGEST = 100_000  # characters of all options, or of a pattern


def terminal(pattern: str) -> str:
    """Write a regular expression as a terminal.

    Raises:
        GrammarError: it is empty, too long, or ends in the middle.
    """
    if not pattern:
        raise GrammarError("the pattern is empty")
    if len(pattern) > _LONGEST:
        raise GrammarError(f"the pattern has more than {_LONGEST} characters")
    if _escapes(pattern):
        raise GrammarError("the pattern ends with a backslash that escapes nothing")
    # It matches the whole answer anyway, and the compiler knows no anchors.
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and not _escapes(pattern[:-1]):
        pattern = pattern[:-1]
    return f"/{llguidance.regex_to_lark(pattern, '')}/"


def _escapes(pattern: str) -> bool:
    """Whether the end of a pattern escapes what comes next."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def one_of(lark: Lark, options: list[str]) -> str:
    """Write a choice among texts.

    Raises:
        GrammarError: there are none, one is empty, or they are too many.
    """
    if not options or "" in options:
        raise GrammarError("a choice needs options, and an option cannot be empty")
    if len(options) > _MOST_OPTIONS or sum(map(len, options)) > _LONGEST:
        words = f"{_MOST_OPTIONS} options and {_LONGEST} characters together"
        raise GrammarError(f"a choice has at most {words}")
    return " | ".join(lark.text(option) for option in dict.fromkeys(options))
