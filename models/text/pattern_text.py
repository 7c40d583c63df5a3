"""Automata as regular expressions that the grammar's compiler can read."""

import re

from ..errors import GrammarError
from .automaton import Alphabet, Automaton, Budget, Builder
from .pattern_program import ANY, TOO_COMPLEX
from .pattern_tree import Node, Range, normal, others

_LONGEST = 4500  # characters of a regular expression
_SURROGATES = (0xD800, 0xDFFF)
_ONE = re.compile(r"\[[^]]*\]|\\x\{[^}]*\}|[0-9A-Za-z]")  # a class or a character, as written here


def plain(tree: Node, budget: Budget, *, searches: bool) -> str:
    """Write a regular expression without look-around for all of a text in which another matches.

    Args:
        tree: the other, behind which anything may follow.
        budget: for the work.
        searches: anything may come before it, too.

    Raises:
        GrammarError: that would be too long, or takes too long.
    """
    alphabet = Alphabet(tree, budget)
    dfa = Builder(alphabet, budget).automaton(tree, searches=searches)
    return _Eliminated(dfa, alphabet, budget).text()


def is_empty(tree: Node, budget: Budget) -> bool:
    """Whether no text matches from its beginning.

    Raises:
        GrammarError: that would take too long to tell.
    """
    return Builder(Alphabet(tree, budget), budget).automaton(tree, searches=False).never(0)


class _Eliminated:
    """Takes the states out of an automaton one by one; what is left is a regular expression."""

    def __init__(self, dfa: Automaton, alphabet: Alphabet, budget: Budget) -> None:
        self._budget = budget
        self._first, self._last = len(dfa.steps), len(dfa.steps) + 1
        self._edges: dict[int, dict[int, str]] = {self._first: {0: ""}, self._last: {}}
        for state, row in enumerate(dfa.steps):
            if dfa.never(state):
                continue
            taken: dict[int, list[Range]] = {}
            for character, target in enumerate(row):
                if not dfa.never(target):
                    taken.setdefault(target, []).extend(alphabet.classes[character])
            edges = {target: _written(normal(ranges)) for target, ranges in taken.items()}
            if dfa.accepts[state]:
                edges[self._last] = ""
            self._edges[state] = edges

    def text(self) -> str:
        """What leads from the first to the last."""
        while left := self._edges.keys() - {self._first, self._last}:
            self._take_out(min(left, key=self._weight))
        if self._last not in self._edges[self._first]:
            raise GrammarError("no text can match it")
        return self._edges[self._first][self._last]

    def _weight(self, state: int) -> int:
        into = [row[state] for at, row in self._edges.items() if state in row and at != state]
        out = [text for target, text in self._edges[state].items() if target != state]
        loop = len(self._edges[state].get(state, ""))
        much = sum(map(len, into)) * len(out) + sum(map(len, out)) * len(into)
        return much + loop * len(into) * len(out)

    def _take_out(self, state: int) -> None:
        out = self._edges.pop(state)
        self._budget.spend(len(self._edges) ** 2)
        loop = out.pop(state, None)
        around = "" if loop is None else f"{_grouped(loop)}*"
        for row in self._edges.values():
            if state not in row:
                continue
            before = _inside(row.pop(state))
            for target, after in out.items():
                way = before + around + _inside(after)
                row[target] = way if target not in row else _either(row[target], way)
                if len(row[target]) > _LONGEST:
                    raise GrammarError(TOO_COMPLEX)


def _either(one: str, other: str) -> str:
    if one == other:
        return one
    if not one or not other:
        return f"(?:{one or other})?"
    return f"{one}|{other}"


def _inside(text: str) -> str:
    """What can stand in a sequence."""
    return f"(?:{text})" if "|" in text else text


def _grouped(text: str) -> str:
    """What can be repeated."""
    return text if _ONE.fullmatch(text) else f"(?:{text})"


def _written(ranges: tuple[Range, ...]) -> str:
    """A class of characters, without halves of surrogate pairs, which no text has."""
    if ranges == ANY:
        return "(?s:.)"
    outside = others(ranges)
    if outside and outside[0][0] >= _SURROGATES[0] and outside[-1][1] <= _SURROGATES[1]:
        return "(?s:.)"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _character(ranges[0][0])
    some, rest = _members(ranges), _members(outside)
    return f"[{some}]" if len(some) <= len(rest) else f"[^{rest}]"


def _members(ranges: tuple[Range, ...]) -> str:
    low, high = _SURROGATES
    cut = [
        part
        for first, last in ranges
        for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
        if part[0] <= part[1]
    ]
    pairs = (
        _character(first) if first == last else f"{_character(first)}-{_character(last)}"
        for first, last in cut
    )
    return "".join(pairs)


def _character(code: int) -> str:
    letter = chr(code)
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{code:X}}}"
