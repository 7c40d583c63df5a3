"""Regular expressions with look-around, as automata.

What is looked at is an automaton of its own, which runs beside the rest from where it stands: a
thread carries the states of all that were begun on its way. So a state of the whole is a set of
threads, and look-around may stand anywhere.
"""

from itertools import pairwise
from typing import NamedTuple

from ..errors import GrammarError
from .pattern_program import (
    ANY,
    TOO_COMPLEX,
    Begin,
    End,
    Match,
    Program,
    Split,
    Take,
    Watch,
    program,
)
from .pattern_tree import LAST, Chars, Either, Look, Node, Range, Repeat, Sequence, normal

_MOST_STATES = 300
_MOST_THREADS = 3000


class Budget:
    """Bounds the work for all patterns of a schema.

    Args:
        steps: of threads.
    """

    def __init__(self, steps: int) -> None:
        self._left = steps

    def spend(self, steps: int) -> None:
        """Take from it.

        Raises:
            GrammarError: it is used up.
        """
        self._left -= steps
        if self._left < 0:
            raise GrammarError(TOO_COMPLEX)


class Automaton(NamedTuple):
    """A deterministic automaton, as small as can be; state 0 is the first.

    Attributes:
        steps: for each state and class of characters, the next state.
        accepts: for each state, whether a text may end there.
    """

    steps: list[list[int]]
    accepts: list[bool]

    def always(self, state: int) -> bool:
        """Whether it accepts here, whatever comes."""
        return self.accepts[state] and self._is_sink(state)

    def never(self, state: int) -> bool:
        """Whether it does not accept any more."""
        return not self.accepts[state] and self._is_sink(state)

    def _is_sink(self, state: int) -> bool:
        return all(target == state for target in self.steps[state])


_Watched = frozenset[tuple[int, int]]  # automata and their states
_Thread = tuple[int, _Watched]


class Alphabet:
    """Classes of characters that the pattern does not tell apart."""

    def __init__(self, tree: Node, budget: Budget) -> None:
        sets: dict[tuple[Range, ...], int] = {}
        _collect(tree, sets)
        edges = {0, LAST + 1}
        edges.update(edge for ranges in sets for low, high in ranges for edge in (low, high + 1))
        cuts = sorted(edges)
        budget.spend(len(cuts) * len(sets))
        found: dict[frozenset[int], list[Range]] = {}
        for low, end in pairwise(cuts):
            within = frozenset(n for ranges, n in sets.items() if _holds(ranges, low))
            found.setdefault(within, []).append((low, end - 1))
        self.classes = [normal(ranges) for ranges in found.values()]
        self._members = {
            ranges: frozenset(i for i, within in enumerate(found) if n in within)
            for ranges, n in sets.items()
        }
        self._members[ANY] = frozenset(range(len(self.classes)))

    def members(self, ranges: tuple[Range, ...]) -> frozenset[int]:
        """Say which classes a set has."""
        return self._members[ranges]


def _collect(node: Node, sets: dict[tuple[Range, ...], int]) -> None:
    match node:
        case Chars(ranges=ranges):
            sets.setdefault(ranges, len(sets))
        case Sequence(items=items) | Either(options=items):
            for item in items:
                _collect(item, sets)
        case Repeat(body=body) | Look(body=body):
            _collect(body, sets)


def _holds(ranges: tuple[Range, ...], code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


class Builder:
    """Makes automata, those of what is looked at before those that look."""

    def __init__(self, alphabet: Alphabet, budget: Budget) -> None:
        self._alphabet = alphabet
        self._budget = budget
        classes = len(alphabet.classes)
        self.dfas = [Automaton([[1] * classes, [1] * classes], [True, False])]  # for the text's end
        self._known: dict[tuple[int, bool], int] = {}  # by the identity of what looks

    def automaton(self, tree: Node, *, searches: bool, begins: bool = True) -> Automaton:
        """Make the automaton of a tree, behind which anything may follow.

        Args:
            tree: the tree.
            searches: anything may come before it, too.
            begins: its first character is the text's.
        """
        code = program(tree, searches=searches)
        return _smallest(*self._determined(code, begins=begins), self._budget)

    def _determined(self, code: Program, *, begins: bool) -> tuple[list[list[int]], list[bool]]:
        first = self._closure(code, [(0, frozenset())], begins=begins)
        numbers = {first: 0}
        order, steps = [first], list[list[int]]()
        for state in order:
            row = []
            for each in range(len(self._alphabet.classes)):
                following = self._closure(code, self._moved(code, state, each), begins=False)
                if following not in numbers:
                    numbers[following] = len(numbers)
                    order.append(following)
                    if len(order) > _MOST_STATES:
                        raise GrammarError(TOO_COMPLEX)
                row.append(numbers[following])
            steps.append(row)
        return steps, [self._accepts(code, state) for state in order]

    def _accepts(self, code: Program, state: frozenset[_Thread]) -> bool:
        return any(
            isinstance(code[at], Match) and all(self.dfas[n].accepts[s] for n, s in watched)
            for at, watched in state
        )

    def _moved(self, code: Program, state: frozenset[_Thread], character: int) -> list[_Thread]:
        self._budget.spend(len(state) + 1)
        moved = []
        for at, watched in state:
            step = code[at]
            if isinstance(step, Take) and character in self._alphabet.members(step.ranges):
                after = [(n, self.dfas[n].steps[s][character]) for n, s in watched]
                moved += self._with(at + 1, after)
        return moved

    def _with(self, at: int, watched: list[tuple[int, int]]) -> list[_Thread]:
        """A thread; none where what it watches has failed."""
        if any(self.dfas[n].never(s) for n, s in watched):
            return []
        return [(at, frozenset((n, s) for n, s in watched if not self.dfas[n].always(s)))]

    def _closure(
        self, code: Program, threads: list[_Thread], *, begins: bool
    ) -> frozenset[_Thread]:
        """All threads that come of some without a character."""
        seen: set[_Thread] = set()
        left = list(threads)
        while left:
            thread = left.pop()
            if thread in seen:
                continue
            self._budget.spend(1)
            seen.add(thread)
            if len(seen) > _MOST_THREADS:
                raise GrammarError(TOO_COMPLEX)
            at, watched = thread
            match code[at]:
                case Split(targets=targets):
                    left += [(target, watched) for target in targets]
                case Begin():
                    left += [(at + 1, watched)] if begins else []
                case End():
                    left += self._with(at + 1, [*watched, (0, 0)])
                case Watch(look=look):
                    number = self._watching(look, begins=begins)
                    left += self._with(at + 1, [*watched, (number, 0)])
        lasting = [thread for thread in seen if isinstance(code[thread[0]], Take | Match)]
        return frozenset(_weakest(lasting))

    def _watching(self, look: Look, *, begins: bool) -> int:
        key = id(look), begins
        if key not in self._known:
            dfa = self.automaton(look.body, searches=False, begins=begins)
            if look.negative:
                dfa = dfa._replace(accepts=[not accepts for accepts in dfa.accepts])
            self.dfas.append(dfa)
            self._known[key] = len(self.dfas) - 1
        return self._known[key]


def _weakest(threads: list[_Thread]) -> list[_Thread]:
    """Drop threads that watch more than another at the same place does."""
    by_place: dict[int, list[_Watched]] = {}
    for at, watched in sorted(threads, key=lambda thread: len(thread[1])):
        kept = by_place.setdefault(at, [])
        if not any(other <= watched for other in kept):
            kept.append(watched)
    return [(at, watched) for at, kept in by_place.items() for watched in kept]


def _smallest(steps: list[list[int]], accepts: list[bool], budget: Budget) -> Automaton:
    """Join states that accept the same texts; state 0 stays the first."""
    block = [int(accepting) for accepting in accepts]
    count = 0
    while True:
        budget.spend(len(steps))
        numbers: dict[tuple[int, ...], int] = {}
        block = [
            numbers.setdefault((block[i], *(block[t] for t in row)), len(numbers))
            for i, row in enumerate(steps)
        ]
        if len(numbers) == count:
            break
        count = len(numbers)
    small: list[list[int]] = [[] for _ in range(count)]
    ends = [False] * count
    for i, row in enumerate(steps):
        small[block[i]] = [block[target] for target in row]
        ends[block[i]] = accepts[i]
    return Automaton(small, ends)
