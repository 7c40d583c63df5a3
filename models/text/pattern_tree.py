"""Regular expressions as trees: the part of the syntax that ECMAScript, Python and Rust share."""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from ..errors import GrammarError

Range = tuple[int, int]
"""The first and the last of some code points."""

LAST = 0x10FFFF
_MOST_COPIES = 1000
_DEEPEST = 50

_BOUND = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}")
_GROUP = re.compile(r"\((\?(:|=|!|P?<[A-Za-z_]\w*>))?")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_LINE_ENDS = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))  # Python's `.` knows the first only
_LETTERS = {"f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09, "v": 0x0B}


class Chars(NamedTuple):
    """One character of a set."""

    ranges: tuple[Range, ...]


class Anchor(NamedTuple):
    """`^` or `$`."""

    at_end: bool


class Look(NamedTuple):
    """What must, or must not, follow, and is not taken."""

    body: "Node"
    negative: bool


class Sequence(NamedTuple):
    """One node behind the other.

    Attributes:
        spans: where in the text each stands.
    """

    items: tuple["Node", ...]
    spans: tuple[Range, ...]


class Either(NamedTuple):
    """One of several."""

    options: tuple[Sequence, ...]


class Repeat(NamedTuple):
    """A node several times; without `most`, as often as one likes."""

    body: "Node"
    least: int
    most: int | None


Node = Chars | Anchor | Look | Sequence | Either | Repeat


def has(node: Node, *kinds: type[Node]) -> bool:
    """Whether it is of one of these kinds, or has such a node in it."""
    if isinstance(node, kinds):
        return True
    match node:
        case Repeat(body=body):
            return has(body, *kinds)
        case Sequence(items=items) | Either(options=items):
            return any(has(item, *kinds) for item in items)
    return False


def normal(ranges: list[Range]) -> tuple[Range, ...]:
    """Sort ranges and join those that touch."""
    joined: list[Range] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return tuple(joined)


def others(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """All other characters."""
    edges = [-1, *(edge for each in ranges for edge in each), LAST + 1]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((low + 1, high - 1) for low, high in pairs if low + 1 < high)


def read(pattern: str) -> Either:
    r"""Read a regular expression.

    ECMAScript and Python differ in `.`, `\d`, `\w`, `\s` and `$`. These are read so that what
    matches here matches in both; below a negation, so that what matches in either matches here.

    Raises:
        GrammarError: it has what is not known here, or is none.
    """
    return _Reader(pattern).whole()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._wide = False  # below an odd number of negations
        self._depth = 0

    def whole(self) -> Either:
        found = self._either()
        if self._at < len(self._text):
            raise GrammarError("the pattern has a parenthesis that closes nothing")
        return found

    def _refuse(self) -> GrammarError:
        rest = self._text[self._at : self._at + 10]
        return GrammarError(f"{rest!r} is not supported in a pattern that has look-around")

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _either(self) -> Either:
        options = [self._sequence()]
        while self._next() == "|":
            self._at += 1
            options.append(self._sequence())
        return Either(tuple(options))

    def _sequence(self) -> Sequence:
        items: list[Node] = []
        spans: list[Range] = []
        while self._next() not in {"", "|", ")"}:
            begin = self._at
            items.append(self._repeated(self._atom()))
            spans.append((begin, self._at))
        return Sequence(tuple(items), tuple(spans))

    def _atom(self) -> Node:
        match self._next():
            case "(":
                return self._group()
            case "[":
                return Chars(self._class())
            case "\\":
                return Chars(self._escaped(wide=self._wide))
            case "^" | "$" as anchor:
                self._at += 1
                return self._end() if anchor == "$" else Anchor(at_end=False)
            case "*" | "+" | "?" | "{" | "}" | "]":
                raise self._refuse()
            case ".":
                self._at += 1
                return Chars(others(_LINE_ENDS[:1] if self._wide else _LINE_ENDS))
        self._at += 1
        code = ord(self._text[self._at - 1])
        return Chars(((code, code),))

    def _end(self) -> Node:
        if not self._wide:
            return Anchor(at_end=True)
        # Python's `$` matches before a last line's end too.
        line_end = Repeat(Chars(_LINE_ENDS[:1]), 0, 1)
        body = Sequence((line_end, Anchor(at_end=True)), ((0, 0), (0, 0)))
        return Look(body, negative=False)

    def _group(self) -> Node:
        match = _GROUP.match(self._text, self._at)
        if match is None or (match[1] is None and self._text.startswith("(?", self._at)):
            raise self._refuse()
        if self._depth >= _DEEPEST:
            raise GrammarError("the pattern is nested too deeply")
        self._at = match.end()
        negative = match[2] == "!"
        self._wide ^= negative
        self._depth += 1
        body = self._either()
        self._depth -= 1
        self._wide ^= negative
        if self._next() != ")":
            raise GrammarError("the pattern has an unclosed group")
        self._at += 1
        return Look(body, negative) if match[2] in {"=", "!"} else body

    def _repeated(self, node: Node) -> Node:
        bound = _BOUND.match(self._text, self._at)
        if bound is not None:
            least = int(bound[1])
            most = least if bound[2] is None else int(bound[3]) if bound[3] else None
        elif self._next() in {"*", "+", "?"}:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._next()]
        else:
            return node
        if isinstance(node, Look | Anchor) or max(least, most or 0) > _MOST_COPIES:
            raise self._refuse()
        if most is not None and least > most:
            raise GrammarError("the pattern has a bound that is less than its first number")
        self._at = self._at + 1 if bound is None else bound.end()
        self._at += self._next() == "?"  # lazy: the same texts match
        if self._next() in {"*", "+", "?"}:
            raise self._refuse()
        return Repeat(node, least, most)

    def _class(self) -> tuple[Range, ...]:
        self._at += 1
        negative = self._next() == "^"
        self._at += negative
        if self._next() in {"]", ""}:
            raise self._refuse()  # ECMAScript's is empty, Python's has a bracket
        found: list[Range] = []
        wide = self._wide ^ negative
        while self._next() != "]":
            found.extend(self._members(wide=wide))
        self._at += 1
        ranges = normal(found)
        return others(ranges) if negative else ranges

    def _members(self, *, wide: bool) -> tuple[Range, ...]:
        low = self._member(wide=wide)
        if self._next() != "-" or self._text[self._at + 1 : self._at + 2] in {"]", ""}:
            return low
        self._at += 1
        high = self._member(wide=wide)
        if not _is_one(low) or not _is_one(high) or low > high:
            raise GrammarError("the pattern has a range of characters that is none")
        return ((low[0][0], high[0][0]),)

    def _member(self, *, wide: bool) -> tuple[Range, ...]:
        if not self._next():
            raise GrammarError("the pattern has an unclosed class of characters")
        if self._next() == "\\":
            return self._escaped(wide=wide)
        self._at += 1
        code = ord(self._text[self._at - 1])
        return ((code, code),)

    def _escaped(self, *, wide: bool) -> tuple[Range, ...]:
        letter = self._text[self._at + 1 : self._at + 2]
        if letter in {"d", "w", "s", "D", "W", "S"}:
            self._at += 2
            if letter.islower():
                return _shorthand(letter, wide=wide)
            return others(_shorthand(letter.lower(), wide=not wide))
        coded = _HEX.match(self._text, self._at + 1)
        if coded is not None:
            code = int(next(filter(None, coded.groups())), 16)
            end = coded.end()
        elif letter in _LETTERS:
            code, end = _LETTERS[letter], self._at + 2
        elif letter and letter.isascii() and not letter.isalnum() and letter.isprintable():
            code, end = ord(letter), self._at + 2
        else:
            raise self._refuse()
        if code > LAST:
            raise self._refuse()
        self._at = end
        return ((code, code),)


def _is_one(ranges: tuple[Range, ...]) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


_DIGIT = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_ASCII_LAST = 0x7F
_PLANE = 0x10000
_SPACES_OF_PYTHON = frozenset({0x1C, 0x1D, 0x1E, 0x1F, 0x85})
_SPACE_OF_ECMASCRIPT = (0xFEFF, 0xFEFF)


@cache
def _shorthand(letter: str, *, wide: bool) -> tuple[Range, ...]:
    r"""What `\d`, `\w` or `\s` means to both ECMAScript and Python, or to either of them."""
    if letter == "w":
        # Python's has letters of all scripts; which ones depends on its version.
        return (*_WORD, (_ASCII_LAST + 1, LAST)) if wide else _WORD
    if letter == "d":
        return normal(list(_digits())) if wide else _DIGIT
    spaces = [(code, code) for code in range(_PLANE) if chr(code).isspace()]
    both = [(code, code) for code, _ in spaces if code not in _SPACES_OF_PYTHON]
    return normal([*spaces, _SPACE_OF_ECMASCRIPT]) if wide else normal(both)


def _digits() -> Iterator[Range]:
    for code in range(2 * _PLANE):  # there are none beyond
        if unicodedata.category(chr(code)) == "Nd":
            yield code, code
