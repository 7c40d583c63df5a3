"""Stop sequences in text that arrives in pieces."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from umbel.models.text.events import StopScanner

LETTERS = st.sampled_from("aab\n👩")
TEXT = st.text(LETTERS, max_size=30)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=6), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Find the stop that ends first, and of those the one that begins first."""
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            longest = max(matched, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def scan(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    return "".join(map(scanner.push, pieces)) + scanner.flush(), scanner.matched


@given(text=TEXT, stops=STOPS, places=st.lists(st.integers(0, 99), max_size=30))
@example(text="abab", stops=["abab", "ba"], places=[2, 3])
@example(text="aab", stops=["aab", "b", "ab"], places=[])
def test_output_is_the_text_before_the_stop_that_completes_first(
    text: str, stops: list[str], places: list[int]
) -> None:
    assert scan(cut(text, places), stops) == reference(text, stops)


@given(text=TEXT, stops=STOPS, places=st.lists(st.integers(0, 99), max_size=30))
def test_nothing_is_held_back_longer_than_it_must_be(
    text: str, stops: list[str], places: list[int]
) -> None:
    scanner = StopScanner(stops)
    seen = passed = ""
    for piece in cut(text, places):
        seen += piece
        passed += scanner.push(piece)
        if scanner.matched is not None:
            break
        held = seen.removeprefix(passed)
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "passed", "left"),
    [
        # A text that begins like one is held until it is known not to be one.
        (["\n\nUser:"], ["Hi.", "\n", "\nUs", "er", ": x"], ["Hi.", "", "", "", ""], ""),
        (["\n\nUser:"], ["a\n", "\nUsed"], ["a", "\n\nUsed"], ""),
        # An answer that ends on half a stop sequence keeps that half.
        (["END"], ["the EN"], ["the "], "EN"),
        # Nothing follows a match.
        (["."], ["one. two.", "three"], ["one", ""], ""),
        # A short one inside a longer one wins, as it is complete first, in any cut.
        (["abcd", "c"], ["abcd"], ["ab"], ""),
        (["abcd", "c"], ["a", "b", "c", "d"], ["", "", "ab", ""], ""),
        # Without any there is no delay.
        ([], ["anything"], ["anything"], ""),
    ],
)
def test_text_passed_on_with_each_piece(
    stops: list[str], pieces: list[str], passed: list[str], left: str
) -> None:
    scanner = StopScanner(stops)
    assert [scanner.push(piece) for piece in pieces] == passed
    assert [scanner.flush(), scanner.flush()] == [left, ""]
