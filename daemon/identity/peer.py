"""Which user is at the other end of a Unix socket, as the kernel says."""

import os
import socket
import struct
import sys

# struct ucred of Linux: pid, uid, gid.
_UCRED = struct.Struct("iII")
# struct xucred of macOS (sys/ucred.h): version, uid, the number of groups, and 16 groups.
_XUCRED = struct.Struct("=IIhxx16I")
_XUCRED_VERSION = 0
_SOL_LOCAL = 0
_LOCAL_PEERCRED = 1
_ROOT = 0


def peer_uid(peer: socket.socket, platform: str = sys.platform) -> int | None:
    """Say which user has connected; None where the system does not tell.

    It is who connected, whoever has the connection now.

    Args:
        peer: a connected Unix socket.
        platform: whose kernel is asked, as `sys.platform` has it.
    """
    if platform == "linux":
        return _linux_uid(peer)
    return _macos_uid(peer) if platform == "darwin" else None


def is_operators(peer: socket.socket) -> bool:
    """Whether the daemon's own user, or root, is at the other end of a connection."""
    if peer.family != socket.AF_UNIX:
        return False
    uid = peer_uid(peer)
    return uid is None or uid in (os.getuid(), _ROOT)  # else the socket's mode alone tells


def peer_name(peer: socket.socket) -> str:
    """Name the other end of a connection: its address, or its user."""
    if peer.family == socket.AF_UNIX:
        return f"uid:{peer_uid(peer)}"
    try:
        return str(peer.getpeername()[0])
    except OSError:  # it has left already
        return ""


def _linux_uid(peer: socket.socket) -> int:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(credentials)[1])


def _macos_uid(peer: socket.socket) -> int | None:
    credentials = peer.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size)
    if len(credentials) < _XUCRED.size:
        return None
    version, uid, *_ = _XUCRED.unpack_from(credentials)
    return int(uid) if version == _XUCRED_VERSION else None
