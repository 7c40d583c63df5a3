"""A stand-in for a daemon that downloads its model for as long as a test wants."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec

LOADING = {
    "status": "loading",
    "phase": "downloading",
    "download": {"done": 3 << 20, "total": 12 << 20},
}


@contextmanager
def loading_daemon(path: Path) -> Iterator[threading.Event]:
    """Listen on a path; downloading until the event is set, and ready from then on."""
    loaded = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer: dict[str, Any] = {"status": "ok"}
            if self.path == "/ready":
                answer = {"status": "ready"} if loaded.is_set() else LOADING
            body = msgspec.json.encode(answer)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "client"

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield loaded
        finally:
            server.shutdown()
            thread.join()
