"""Stop sequences in text that arrives in pieces."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from umbel.models.text.markers import StopScanner

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
    """Cut text at the given places, modulo its length; empty pieces happen."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def scan(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """Push all pieces, then flush."""
    scanner = StopScanner(stops)
    return "".join(map(scanner.push, pieces)) + scanner.flush(), scanner.matched


@given(text=TEXT, stops=STOPS, places=st.lists(st.integers(0, 99), max_size=30))
@example(text="abab", stops=["abab", "ba"], places=[2, 3])
@example(text="aab", stops=["aab", "b", "ab"], places=[])
def test_output_is_the_text_before_the_stop_that_completes_first(
    text: str, stops: list[str], places: list[int]
) -> None:
    """However tokens cut the text, the answer ends at the same place for the same reason."""
    assert scan(cut(text, places), stops) == reference(text, stops)


@given(text=TEXT, stops=STOPS, places=st.lists(st.integers(0, 99), max_size=30))
def test_nothing_is_held_back_longer_than_it_must_be(
    text: str, stops: list[str], places: list[int]
) -> None:
    """Held-back text could still become a stop sequence; all else has been passed on."""
    scanner = StopScanner(stops)
    seen = passed = ""
    for piece in cut(text, places):
        seen += piece
        passed += scanner.push(piece)
        if scanner.matched is not None:
            break
        held = seen.removeprefix(passed)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_sequence_over_several_pieces_is_never_shown() -> None:
    """The beginning of a stop sequence is not streamed before it is known not to be one."""
    scanner = StopScanner(["\n\nUser:"])
    assert [scanner.push(piece) for piece in ("Hi.", "\n", "\nUs", "er", ": x")] == [
        "Hi.",
        "",
        "",
        "",
        "",
    ]
    assert scanner.matched == "\n\nUser:"


def test_a_false_alarm_is_passed_on() -> None:
    """Text that only looked like a stop sequence reaches the client in full."""
    scanner = StopScanner(["\n\nUser:"])
    assert [scanner.push(piece) for piece in ("a\n", "\nUsed")] == ["a", "\n\nUsed"]
    assert scanner.matched is None


def test_the_end_of_the_text_releases_what_was_held() -> None:
    """An answer that ends on half a stop sequence keeps that half, once."""
    scanner = StopScanner(["END"])
    assert scanner.push("the EN") == "the "
    assert scanner.flush() == "EN"
    assert scanner.flush() == ""


def test_nothing_follows_a_match() -> None:
    """After a stop sequence no text is passed on, whatever is pushed or flushed."""
    scanner = StopScanner(["."])
    assert scanner.push("one. two.") == "one"
    assert scanner.push("three") == ""
    assert scanner.flush() == ""


@pytest.mark.parametrize("pieces", [["abcd"], ["abc", "d"], ["a", "b", "c", "d"]])
def test_the_winner_does_not_depend_on_the_cut(pieces: list[str]) -> None:
    """A short stop inside a longer one wins because it is complete first, in any cut."""
    assert scan(pieces, ["abcd", "c"]) == ("ab", "c")


def test_without_stops_all_text_passes_at_once() -> None:
    """A request without stop sequences has no delay."""
    scanner = StopScanner([])
    assert scanner.push("anything") == "anything"
    assert scanner.flush() == ""
