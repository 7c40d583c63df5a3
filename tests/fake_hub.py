"""A server that answers as Hugging Face does, as far as a download asks, and fails as told.

Weights lie in its large storage, as there. Nothing leaves 127.0.0.1.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" + "0" * 34
REPO = "tests/tiny"
GATED = "tests/gated"


class FakeHub:
    """Serves the files of a folder as one repo.

    Attributes:
        endpoint: for HF_ENDPOINT.
        ranges: from which byte each request for weights began.
        revisions: that were asked about.
        half: once half of the weights was sent it is set.
        go_on: half of the weights are sent; the rest once this is set.
        breaks: the connection ends there instead, and the weights are not there any more.
        spoils: the first byte of the weights is another one.
    """

    def __init__(self, folder: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.ranges: list[int] = []
        self.revisions: set[str] = set()
        self.half = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.breaks = self.spoils = False
        hub = self

        class Handler(_Handler):
            def __init__(self, *args: Any) -> None:
                self.hub = hub
                super().__init__(*args)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def environment(self, folder: Path) -> dict[str, str]:
        """Environment of a process that downloads from here into a folder."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(folder),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def siblings(self) -> list[dict[str, Any]]:
        """List the files as the hub does."""
        return [self._sibling(name, content) for name, content in sorted(self.files.items())]

    def _sibling(self, name: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": etag(content)}
        if is_large(name):
            sha256 = hashlib.sha256(content).hexdigest()
            entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
        return entry


def etag(content: bytes) -> str:
    """Name a small file by its content."""
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def is_large(name: str) -> bool:
    """Return True if a file lies in the large storage."""
    return name.endswith(".safetensors")


@contextmanager
def serving(folder: Path) -> Iterator[FakeHub]:
    """Serve a folder until the block ends."""
    hub = FakeHub(folder)
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        hub.server.shutdown()
        hub.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """Answer with one."""
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/([\w.]+))?", path):
            self.hub.revisions.add(found[2] or "main")
            self._describe(found[1])
        elif re.fullmatch(rf"/api/models/({REPO}|{GATED})/tree/[\w.]+", path):
            self._send(200, json.dumps([_leaf(each) for each in self.hub.siblings()]).encode())
        elif path.startswith(f"/{GATED}/resolve/"):
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif found := re.fullmatch(rf"/{REPO}/resolve/[\w.]+/(.+)", path):
            self._file(found[1], with_body=with_body)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _describe(self, repo: str) -> None:
        if repo not in (REPO, GATED):
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        told = {"_id": "1", "id": repo, "sha": COMMIT, "siblings": self.hub.siblings(), "tags": []}
        self._send(200, json.dumps(told).encode())

    def _file(self, name: str, *, with_body: bool) -> None:
        content = self.hub.files.get(name)
        if content is None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        tag = hashlib.sha256(content).hexdigest() if is_large(name) else etag(content)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"}
        if is_large(name) and with_body:
            self._weights(content, headers)
        else:
            self._send(200, content, headers, with_body=with_body)

    def _weights(self, content: bytes, headers: dict[str, str]) -> None:
        hub = self.hub
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begin = int(found[1]) if found else 0
        if hub.breaks and hub.half.is_set():
            self._send(503, b"{}")
            return
        hub.ranges.append(begin)
        if hub.spoils:
            content = bytes([content[0] ^ 1]) + content[1:]
        self.send_response(206 if found else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        middle = max(begin, len(content) // 2)
        self.wfile.write(content[begin:middle])
        self.wfile.flush()
        hub.half.set()
        if hub.breaks:
            self.close_connection = True
            return
        hub.go_on.wait()
        self.wfile.write(content[middle:])

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        with_body: bool = True,
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(body)


def _leaf(entry: dict[str, Any]) -> dict[str, Any]:
    """Describe a file as the listing of a tree does."""
    leaf = {"type": "file", "path": entry["rfilename"], "size": entry["size"]}
    leaf["oid"] = entry["blobId"]
    if "lfs" in entry:
        lfs = entry["lfs"]
        leaf["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": 134}
    return leaf
