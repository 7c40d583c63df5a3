"""How urgent a request is: what it asks for, and what its tenant may have."""

from typing import Any

import pytest

from umbel.daemon.priorities import PRIORITY_HEADER, priority_of
from umbel.scheduler.fairness.entry import Priority


@pytest.mark.parametrize(
    ("header", "flex", "highest", "expected"),
    [
        (None, False, "interactive", Priority.INTERACTIVE),
        (None, True, "interactive", Priority.BATCH),
        ("batch", False, "interactive", Priority.BATCH),
        ("interactive", True, "interactive", Priority.INTERACTIVE),
        ("interactive", False, "batch", Priority.BATCH),
        (None, False, "batch", Priority.BATCH),
    ],
)
def test_the_lower_one_holds(
    header: str | None, highest: Any, expected: Priority, *, flex: bool
) -> None:
    """The header is stronger than the body, and the tenant's setting than both."""
    headers = {} if header is None else {PRIORITY_HEADER: header}
    assert priority_of(headers, highest, flex=flex) is expected
