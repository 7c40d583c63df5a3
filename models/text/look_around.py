"""Patterns with look-ahead, written without it: the grammar's compiler knows none."""

import re
from typing import NamedTuple

from ..errors import GrammarError
from .automaton import Budget
from .pattern_program import ANY
from .pattern_text import is_empty, plain
from .pattern_tree import Anchor, Chars, Either, Look, Node, Range, Repeat, Sequence, has, read

_STEPS = 250_000  # about a second
_LONGEST = 5000
_NOWHERE: tuple[Range, ...] = ()
_LOOKS = re.compile(r"\(\?<?[=!]")


class _Split(NamedTuple):
    """A pattern that begins with look-ahead, taken apart.

    Attributes:
        ahead: what is looked at, with its text.
        rest: the pattern behind it.
        begins: whether `^` stood before it.
    """

    ahead: list[tuple[Look, str]]
    rest: str
    begins: bool


class LookAround:
    """Rewrites the patterns of schemas; the work for all of them is bounded."""

    def __init__(self) -> None:
        self._budget = Budget(_STEPS)
        self._known: dict[str, list[str]] = {}

    def parts(self, pattern: str) -> list[str]:
        """Write a pattern as patterns without look-around, all of which must match.

        No text matches these that does not match it. One that may stand anywhere in a text, and
        is too complex for that, matches at the text's beginning only.

        Raises:
            GrammarError: it has look-behind or what else is not supported, or is too complex.
        """
        if not _LOOKS.search(pattern):
            return [pattern]
        if pattern not in self._known:
            self._known[pattern] = self._parts(pattern)
        return self._known[pattern]

    def one(self, *patterns: str) -> str:
        """Write patterns, all of which must match, as one without look-around.

        Raises:
            GrammarError: as `parts` does.
        """
        first, *more = patterns
        more = [each for each in more if not self._implies(first, each)]
        if not more and not _LOOKS.search(first):
            return first
        ahead = [_anywhere(self._read(each)) for each in (first, *more)]
        return self._whole(Sequence(tuple(ahead), _NOWHERE), searches=False)

    def _implies(self, one: str, other: str) -> bool:
        """Whether all texts that match a pattern match another, too."""
        both = _anywhere(self._read(one)), _anywhere(self._read(other), negative=True)
        return is_empty(Sequence(both, _NOWHERE), self._budget)

    def _read(self, pattern: str) -> Either:
        if len(pattern) > _LONGEST:
            raise GrammarError(f"has look-around and more than {_LONGEST} characters")
        return read(pattern)

    def _parts(self, pattern: str) -> list[str]:
        tree = self._read(pattern)
        if not has(tree, Look):
            return [pattern]
        split = _split(tree, pattern)
        if not split.ahead:
            return [self._whole(tree)]
        if not split.begins:
            try:
                return [self._whole(tree)]
            except GrammarError:  # too complex, because it may match anywhere
                pass
        parts = [self._ahead(look, text) for look, text in split.ahead]
        return [*self.parts(f"^{split.rest}"), *parts]

    def _whole(self, tree: Node, *, searches: bool = True) -> str:
        return f"^(?:{plain(tree, self._budget, searches=searches)})$"

    def _ahead(self, look: Look, text: str) -> str:
        if not look.negative and _is_simple(look.body):
            return f"^{text}"
        return self._whole(look, searches=False)


def _anywhere(tree: Node, *, negative: bool = False) -> Look:
    """A tree that matches somewhere behind here, or nowhere."""
    return Look(Sequence((Repeat(Chars(ANY), 0, None), tree), _NOWHERE), negative)


def _split(tree: Either, pattern: str) -> _Split:
    if len(tree.options) > 1:
        return _Split([], pattern, begins=False)
    begins, ahead, end = False, list[tuple[Look, str]](), 0
    for item, span in zip(*tree.options[0], strict=True):
        if isinstance(item, Look) and pattern.startswith("(?", span[0]):
            ahead.append((item, pattern[span[0] + 3 : span[1] - 1]))
        elif isinstance(item, Anchor) and not item.at_end:
            begins = True
        else:
            break
        end = span[1]
    return _Split(ahead, pattern[end:], begins)


def _is_simple(body: Node) -> bool:
    """Whether what is looked at is a pattern as it is written, when `^` comes before it."""
    match body:
        case Either(options=(Sequence(items=items),)):
            ends = bool(items) and isinstance(items[-1], Anchor) and items[-1].at_end
            inner = items[:-1] if ends else items
            return not any(has(item, Anchor, Look) for item in inner)
    return False
