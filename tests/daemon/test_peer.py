"""Which user is at the other end of a Unix socket, and which tenant that is."""

import os
import socket
import struct
from typing import cast

import pytest

from umbel.daemon.config import TenantSettings
from umbel.daemon.identity.tenants import peer_uid, tenant_of_uid


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
