"""An engine that is stuck while the event loop lives: who watches the daemon learns of it."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from .running import ANSWER, START, RunningDaemon, eventually, is_ready, spawn

BOUND = 6.0
"""Seconds in one call after which an engine is stalled, instead of two minutes."""

# The model computes nothing for as long as a file is there. MLX's thread hangs in it, and no other.
STICKY = f"""
import os, time
from pathlib import Path
from umbel.__main__ import main
from umbel.daemon.observability import status
from mlx_lm.models import llama
status.STALLED_AFTER = {BOUND}
compute = llama.Model.__call__
def computes(*words, **named):
    while Path(os.environ["STUCK"]).exists():
        time.sleep(0.01)
    return compute(*words, **named)
llama.Model.__call__ = computes
main()
"""


def beats(heard: socket.socket) -> int:
    """Take what has come, and count the watchdog's beats in it; what does not fit gets lost."""
    count = 0
    with suppress(BlockingIOError):
        while True:
            count += b"WATCHDOG=1" in heard.recv(4096)
    return count


def health(daemon: RunningDaemon) -> tuple[int, str]:
    """Answer of `/health`; the event loop gives it at once."""
    reply = daemon.request("GET", "/health")
    return reply.status, reply.json()["status"]


def is_stuck(daemon: RunningDaemon) -> bool:
    """True if a request is in a step that has not ended."""
    engine: dict[str, Any] = daemon.status()["engine"]
    return bool(engine["running"]) and not engine["running"][0]["output_tokens"]


@pytest.mark.slow
def test_the_watchdog_hears_nothing_more(
    heard: socket.socket, short_path: Path, long_tiny_dir: Path
) -> None:
    """Beats go on in a call within the bound, end beyond it, and come back with the engine."""
    stuck = short_path / "stuck"
    env = {"NOTIFY_SOCKET": str(short_path / "notify"), "WATCHDOG_USEC": "600000"}
    daemon = spawn(
        short_path, long_tiny_dir, env=env | {"STUCK": str(stuck)}, program=("-c", STICKY)
    )
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    try:
        eventually(lambda: is_ready(daemon), START)
        stuck.touch()
        late = time.monotonic() + BOUND  # after which this machine was too busy to see it
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(daemon.post, body)
            eventually(lambda: is_stuck(daemon))
            beats(heard)
            eventually(lambda: beats(heard) or time.monotonic() > late)
            assert health(daemon) == (200, "ok") or time.monotonic() > late
            eventually(lambda: health(daemon)[0] == 503)
            assert health(daemon) == (503, "stalled")
            assert daemon.request("GET", "/ready").json()["status"] == "stalled"
            assert daemon.status()["state"] == "stalled"
            beats(heard)
            with pytest.raises(AssertionError, match="never came"):
                eventually(lambda: beats(heard), 2)
            stuck.unlink()
            assert answer.result(ANSWER).status == 200
        assert health(daemon) == (200, "ok")
        eventually(lambda: beats(heard))
        assert daemon.terminate() == 0
    finally:
        stuck.unlink(missing_ok=True)
        daemon.process.kill()
        daemon.process.wait(60)
