"""Bytes on a daemon's socket, as no HTTP client would send them."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from .crowd import parsed
from .running import Reply

PATIENCE = 60.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    """Connect to a daemon's socket; the block owns the connection.

    A connect with a timeout would not wait where the backlog is full, but fail.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.settimeout(PATIENCE)
        yield connection


def chat_request(**fields: object) -> bytes:
    """Write a request for a chat completion on a connection that is kept alive."""
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "hello"}], **fields})
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_reply(connection: socket.socket) -> Reply:
    """Read one answer whose length its headers say."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):  # not a byte more: it would be the next answer's
        head += _some(connection, 1)
    headers = [line.split(b":", 1) for line in head.lower().strip().split(b"\r\n")[1:]]
    length = next(int(value) for name, value in headers if name == b"content-length")
    body = b""
    while len(body) < length:
        body += _some(connection, length - len(body))
    return parsed(head + body)


def read_to_end(connection: socket.socket) -> bytes:
    """Read until the daemon closes the connection."""
    received = b""
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            return received
        if not part:
            return received
        received += part


def _some(connection: socket.socket, most: int) -> bytes:
    part = connection.recv(most)
    assert part, "the daemon closed the connection"
    return part
