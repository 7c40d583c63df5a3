"""Regular expressions as programs of a few instructions, by Thompson's construction."""

from typing import NamedTuple

from ..errors import GrammarError
from .pattern_tree import LAST, Anchor, Chars, Either, Look, Node, Range, Repeat, Sequence

_MOST_CODE = 3000

ANY: tuple[Range, ...] = ((0, LAST),)
TOO_COMPLEX = "the pattern is too complex to be supported with look-around"


class Take(NamedTuple):
    """Take one character of a set."""

    ranges: tuple[Range, ...]


class Split(NamedTuple):
    """Go on at several places."""

    targets: list[int]


class Watch(NamedTuple):
    """Go on where what is looked at follows, or does not."""

    look: Look


class Begin(NamedTuple):
    """Go on at the beginning of the text only."""


class End(NamedTuple):
    """Go on at the end of the text only."""


class Match(NamedTuple):
    """End: the pattern has matched."""


Program = list[Take | Split | Watch | Begin | End | Match]


def program(tree: Node, *, searches: bool) -> Program:
    """Write the program of a tree, behind which anything may follow.

    Args:
        tree: the tree.
        searches: anything may come before it, too.

    Raises:
        GrammarError: it is too long.
    """
    code: Program = []
    if searches:
        _emit(Repeat(Chars(ANY), 0, None), code)
    _emit(tree, code)
    _emit(Repeat(Chars(ANY), 0, None), code)
    code.append(Match())
    return code


def _emit(node: Node, code: Program) -> None:
    if len(code) > _MOST_CODE:
        raise GrammarError(TOO_COMPLEX)
    match node:
        case Chars(ranges=ranges):
            code.append(Take(ranges))
        case Anchor(at_end=at_end):
            code.append(End() if at_end else Begin())
        case Look():
            code.append(Watch(node))
        case Sequence(items=items):
            for item in items:
                _emit(item, code)
        case Either(options=options):
            _emit_either(options, code)
        case Repeat():
            _emit_repeat(node, code)


def _emit_either(options: tuple[Sequence, ...], code: Program) -> None:
    split, ends = Split([]), []
    code.append(split)
    for option in options:
        split.targets.append(len(code))
        _emit(option, code)
        ends.append(Split([]))
        code.append(ends[-1])
    for end in ends:
        end.targets.append(len(code))


def _emit_repeat(repeat: Repeat, code: Program) -> None:
    for _ in range(repeat.least):
        _emit(repeat.body, code)
    if repeat.most is None:
        _emit_loop(repeat.body, code)
    else:
        _emit_optional(repeat.body, repeat.most - repeat.least, code)


def _emit_loop(body: Node, code: Program) -> None:
    split, begin = Split([]), len(code)
    code.append(split)
    _emit(body, code)
    code.append(Split([begin]))
    split.targets.extend([begin + 1, len(code)])


def _emit_optional(body: Node, times: int, code: Program) -> None:
    splits = []
    for _ in range(times):
        splits.append(Split([len(code) + 1]))
        code.append(splits[-1])
        _emit(body, code)
    for split in splits:
        split.targets.append(len(code))
