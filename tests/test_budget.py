"""The CPU budget of test files."""

from .budget import SPARE, limits


def test_twice_the_figure_and_some_spare() -> None:
    assert limits({"a": 30.0, "b": 1.0}, {"a": 30.0}) == {"a": 60.0 + SPARE, "b": SPARE}


def test_a_slow_machine_scales_all_figures() -> None:
    budget = {"a": 10.0, "b": 10.0, "c": 10.0}
    assert limits({"a": 15.0, "b": 15.0, "c": 90.0}, budget)["c"] == 30.0 + SPARE
    assert limits({"a": 90.0, "b": 90.0, "c": 90.0}, budget)["c"] == 40.0 + SPARE


def test_a_fast_machine_does_not() -> None:
    assert limits({"a": 1.0}, {"a": 10.0})["a"] == 20.0 + SPARE
