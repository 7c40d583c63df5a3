"""A request's sender, by its socket, and what its headers ask for."""

import os
import socket
import struct
from typing import Any, cast

import pytest

from umbel.daemon.config import TenantSettings
from umbel.daemon.http.failures import APIError
from umbel.daemon.identity.caller import PRIORITY_HEADER, TIMEOUT_HEADER, priority_of, timeout_of
from umbel.daemon.identity.tenants import peer_uid, tenant_of_uid
from umbel.scheduler.order import Priority

from .running import RunningDaemon


class FakePeer:
    """A socket of another system: answers what its kernel would."""

    def __init__(self, *asked: int, answer: bytes) -> None:
        self._asked = asked
        self._answer = answer

    def getsockopt(self, *asked: int) -> bytes:
        """Answer the one question."""
        assert asked == self._asked
        return self._answer


def test_this_system() -> None:
    """A pair of sockets has this process at both ends."""
    one, other = socket.socketpair()
    with one, other:
        assert peer_uid(one) == os.geteuid()


@pytest.mark.parametrize("uid", [0, 501, 2**32 - 2])
def test_macos(uid: int) -> None:
    """`struct xucred` as xnu has it: version, uid, 16-bit count, padding, 16 groups."""
    raw = struct.pack("=IIh2x16I", 0, uid, 3, 20, 12, 61, *[0] * 13)
    assert len(raw) == 76
    peer = cast("socket.socket", FakePeer(0, 1, 76, answer=raw))
    assert peer_uid(peer, "darwin") == uid


def test_unknown_credentials_are_no_user() -> None:
    """Another version of the struct, a short one, and another system."""
    newer = cast("socket.socket", FakePeer(0, 1, 76, answer=struct.pack("=I", 1) + bytes(72)))
    short = cast("socket.socket", FakePeer(0, 1, 76, answer=bytes(8)))
    assert peer_uid(newer, "darwin") is None
    assert peer_uid(short, "darwin") is None
    assert peer_uid(newer, "plan9") is None


def test_a_user_has_the_name_of_the_table() -> None:
    """A user in none has a tenant by number, and an unknown user is the default."""
    tenants = {"a": TenantSettings(uids=[1, 2]), "b": TenantSettings(uids=[3])}
    found = [tenant_of_uid(uid, tenants) for uid in (1, 2, 3, 4, None)]
    assert found == ["a", "a", "b", "uid:4", "default"]


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
