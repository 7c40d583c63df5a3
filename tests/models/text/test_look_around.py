"""Patterns with look-ahead: what is written for them matches no more than they do."""

import random
import re

import pytest

from umbel.models.errors import GrammarError
from umbel.models.text.look_around import LookAround

EXACT = [
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)$",
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+S)?)?)$",
    r"^(?=.{1,4}\.?$)[a-z](?:[a-z.]{0,6}[a-z])?\.?$",
    r"^(?=.*[A-Z])(?=.*\d).{3,}$",
    r"^(?=(?!a)[^b]|ab$).*",
    r"^(?:(?!bad).)*$",
    r"^(?!(?:a|b)$)[a-z]+$",
    r"^a|(?!b)c$",
    r"(?=a|b)[^a]",
    r"a(?!b)",
    r"x(?!(?!y)z)",
    r"^(?:(?=\d)\w|-)+$",
    r"^(?![\s\-\x41])[\u0041-\u{5A}\/]*?$".replace(r"\u{5A}", r"\u005A"),
    r"[(?=]",
]
LETTERS = "abdxyzAPTW019.+-@ =("


def matches(parts: list[str], text: str) -> bool:
    """Whether a text matches all patterns that were written, as the compiler reads them."""
    return all(re.search(_for_python(part), text) for part in parts)


def _for_python(pattern: str) -> str:
    coded = re.sub(r"\\x\{([0-9A-F]+)\}", lambda m: f"\\U{int(m[1], 16):08x}", pattern)
    return re.sub(r"\$(?=\)*$)", r"\\Z", coded)


def texts(pattern: str) -> list[str]:
    """Random texts, many of them of what is in a pattern."""
    dice = random.Random(pattern)  # noqa: S311  (not a secret)
    own = [letter for letter in pattern if letter.isalnum() or letter in ".-@"]
    letters = [*LETTERS, *own]
    return ["".join(dice.choices(letters, k=dice.randrange(9))) for _ in range(1500)]


@pytest.mark.parametrize("pattern", EXACT)
def test_the_same_texts_match(pattern: str) -> None:
    """In several patterns, where look-ahead comes first, and in one."""
    looks = LookAround()
    parts, one = looks.parts(pattern), looks.one(pattern)
    assert "(?=" not in "".join([*parts, one]).replace("[(?=]", "")
    assert "(?!" not in "".join([*parts, one])
    for text in texts(pattern):
        expected = re.search(pattern, text) is not None
        assert (matches(parts, text), matches([one], text)) == (expected, expected), text


def test_patterns_that_must_all_match_become_one() -> None:
    """One that another implies adds nothing."""
    looks = LookAround()
    one = looks.one("^[a-c]+$", r"^[\s\S]{2,3}$", "b")
    for text in texts("abc"):
        assert matches([one], text) == bool(re.fullmatch(r"(?=.*b)[abc]{2,3}", text)), text
    assert looks.one("^[0-9]{9}$", "^[0-9]+$") == "^[0-9]{9}$"


@pytest.mark.parametrize(
    ("pattern", "text", "other"),
    [
        (r"^(?!.*\d)", "a٣", "ab"),  # digits of other scripts are digits for Python
        (r"^(?!\w)", "é", "-"),
        (r"^(?!\s)", "\x1c", "a"),
        (r"^(?!\s)", "\ufeff", "a"),
        (r"^(?!a$)", "a\n", "ab"),  # `$` is before the last line's end for Python
        (r"^(?=[\s\S]*)(?!b)(?:(?!c)\d)$", "٣", "3"),
        (r"^(?!b)(?:(?!c).)*$", "a\u2028", "a"),  # no line ends in ECMAScript's `.`
        (r"^(?![^\d])", "a", "1"),
        (r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?=.*[-+])[A-Za-z\d+-]{20,}", "aA1-", "aA1-" * 5),
    ],
)
def test_what_is_read_in_two_ways_does_not_match(pattern: str, text: str, other: str) -> None:
    """A text matches only if it does for ECMAScript and for Python."""
    parts = LookAround().parts(pattern)
    assert (matches(parts, text), matches(parts, other)) == (False, True)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?<=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"(?!a)\bb", "look-around"),
        (r"(?!a)(b)\1", "look-around"),
        ("(?i)(?!a)b", "look-around"),
        ("(?!a)*b", "look-around"),
        ("(?!a)b++", "look-around"),
        ("(?!a)b{,2}", "look-around"),
        ("(?!a)b{" + "9" * 4900 + "}", "look-around"),
        ("(?!a)[]b]", "look-around"),
        (r"(?!a)\p{L}", "look-around"),
        (r"(?!a)\u{110000}", "look-around"),
        ("(?!a)b{3,2}", "less than its first"),
        ("(?!a)[c-b]", "range of characters"),
        ("(?!a)[b", "unclosed class"),
        ("(?!a)(b", "unclosed group"),
        ("(?!a)b)", "closes nothing"),
        ("(?!)", "no text can match"),
        ("(?!a)" + "b" * 6000, "more than 5000 characters"),
        ("((?!a)[ab]{900}){900}", "too complex"),
        ("((?!.*x.{12})[wx])*", "too complex"),
    ],
)
def test_what_is_not_supported_is_refused(pattern: str, words: str) -> None:
    """In words that say what it is."""
    with pytest.raises(GrammarError, match=words):
        LookAround().parts(pattern)
