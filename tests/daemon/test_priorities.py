"""How urgent a request is: what it asks for, and what its tenant may have."""

from typing import Any

import pytest

from umbel.daemon.http.failures import APIError
from umbel.daemon.identity.caller import PRIORITY_HEADER, TIMEOUT_HEADER, priority_of, timeout_of
from umbel.scheduler.order import Priority

from .running import RunningDaemon


@pytest.mark.parametrize(
    ("header", "seconds"), [(None, None), ("30", 30.0), ("0.5", 0.5), ("1e3", 1000.0)]
)
def test_a_timeout(header: str | None, seconds: float | None) -> None:
    """Seconds, as a number."""
    assert timeout_of({} if header is None else {TIMEOUT_HEADER: header}) == seconds


@pytest.mark.parametrize("header", ["soon", "", "0", "-1", "nan", "inf"])
def test_a_timeout_that_is_none(header: str) -> None:
    """It says what was sent."""
    with pytest.raises(APIError, match="send a positive number of seconds") as refusal:
        timeout_of({TIMEOUT_HEADER: header})
    assert (refusal.value.status, refusal.value.param) == (400, TIMEOUT_HEADER)


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


def test_a_batch_answer_makes_room_for_its_tenants_own(tiny_daemon: RunningDaemon) -> None:
    """The daemon runs one request at a time, and answers what comes in the middle of it."""

    def ask(text: str, tokens: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        return {"messages": messages, "max_tokens": tokens, "temperature": 0}

    before = tiny_daemon.status()["engine"]["yields"]
    batch, response = tiny_daemon.stream({**ask("a batch", 6000), "service_tier": "flex"})
    for _ in range(6):
        response.readline()
    assert tiny_daemon.post(ask("hello", 3)).status == 200
    assert tiny_daemon.status()["engine"]["yields"] == before + 1
    for _ in range(6):
        assert b"error" not in response.readline()
    batch.close()
