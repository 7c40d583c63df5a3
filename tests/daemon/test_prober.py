"""A prober with a real clock, over a real daemon: see `tests/scenario/test_prober.py`.

In each try it sends the victim's text, and text that no client has sent, in random order, and says
that the faster one was the victim's. Whatever else the machine does slows both alike.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import msgspec
import pytest

from .running import ANSWER, RunningDaemon, running

CONTROL = 40
AT_ONCE = 20
"""Tries after which the cache is emptied: it is walked after each request."""
LENGTH = 300
"""Tokens of a prompt: what it takes to compute them is several times what a request takes."""
VOCABULARY = 256

Send = Callable[[list[int]], float]
"""Sends a prompt; returns the seconds that its answer takes."""


def sender(connection: HTTPConnection) -> Send:
    """Make what sends a prompt on a connection, and returns the seconds that its answer takes."""

    def send(prompt: list[int]) -> float:
        body = msgspec.json.encode({"prompt": prompt, "max_tokens": 1, "temperature": 0})
        begin = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        assert response.status == 200
        return time.perf_counter() - begin

    return send


def guessed(victim: Send, prober: Send, empty: Callable[[], object], tries: int) -> float:
    """How often the prober names the victim's prompt of two; `empty` forgets past tries."""
    draw = random.Random(f"{tries}")  # noqa: S311  (not a secret)
    right = 0
    for number in range(tries):
        if number % AT_ONCE == 0:
            empty()
        secret, other = ([draw.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in "ab")
        victim(secret)
        pair = [secret, other]
        draw.shuffle(pair)
        seconds = [prober([*prompt, 1]) for prompt in pair]
        right += pair[seconds.index(min(seconds))] is secret
    return right / tries


@pytest.fixture
def quiet_daemon(long_tiny_dir: Path, short_path: Path) -> Iterator[RunningDaemon]:
    """A daemon that writes nothing to disk meanwhile: its clock is finer, and a try cheaper."""
    with running(short_path, long_tiny_dir, "--port", "0", "--no-disk") as daemon:
        yield daemon


@pytest.mark.parametrize(
    "tries",  # each is three requests
    [pytest.param(100, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.nightly)],
)
def test_a_clock_tells_nothing_of_another_tenant(quiet_daemon: RunningDaemon, tries: int) -> None:

    def empty() -> None:
        assert quiet_daemon.request("POST", "/cache/clear").status == 200

    tcp = HTTPConnection("127.0.0.1", quiet_daemon.tcp_port(), timeout=ANSWER)
    unix, own = quiet_daemon.connection(), quiet_daemon.connection()
    try:
        control = guessed(sender(unix), sender(own), empty, CONTROL)
        assert control > 0.8, "its own tenant's"
        right = guessed(sender(unix), sender(tcp), empty, tries)
        assert abs(right - 0.5) < 4 / (2 * math.sqrt(tries)), right
    finally:
        for connection in (tcp, unix, own):
            connection.close()
