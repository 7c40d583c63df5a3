"""Tokens a minute: who is told to come again finds something then."""

import pytest

from umbel.scheduler.tenants import Quotas, Terms


@pytest.mark.parametrize(
    ("most", "spent", "now"),
    [
        (2, 18.966666666666665, 1.0000000000000637),  # 509 s, less a rounding
        (1, 17.833333333333332, 10.000000000000114),
        (26, 27.3, 7.0),
        (60, 61.0, 0.0),
        (7, 7.0, 3.3),
    ],
)
def test_there_is_something_when_it_was_said(most: int, spent: float, now: float) -> None:
    """Also where what is missing is a whole number of seconds, but for a rounding."""
    quotas = Quotas(lambda _: Terms(1.0, None, None, most))
    quotas.charge("a", spent, now)
    seconds = quotas.refills_in("a", now)
    assert (spent - most) * 60 / most <= seconds <= (spent - most) * 60 / most + 1.1
    assert quotas.refills_in("a", now + seconds) == 0
    assert quotas.refills_in("b", now) == 0
