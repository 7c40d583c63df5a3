"""A daemon's life: cancellation, queueing, stopping, and its answers meanwhile."""

import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from .crowd import is_idle
from .running import (
    START,
    STOP,
    UMBEL,
    Reply,
    RunningDaemon,
    UnixConnection,
    eventually,
    is_ready,
    running,
    spawn,
)

USER = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"messages": USER, "temperature": 0, "max_tokens": 6000}
SHORT: dict[str, Any] = {"messages": USER, "temperature": 0, "max_tokens": 3}
CHAT = "/v1/chat/completions"
ONE = ("--max-batch", "1")


def begin(daemon: RunningDaemon, **fields: Any) -> tuple[UnixConnection, HTTPResponse]:
    """Start a long stream and read its first tokens."""
    connection, response = daemon.stream(LONG | fields)
    assert response.status == 200
    for _ in range(6):
        response.readline()
    return connection, response


def number_running(daemon: RunningDaemon) -> int:
    """How many requests the engine works on."""
    return len(daemon.status()["engine"]["running"])


def test_streaming_disconnect_stops_the_generation(tiny_daemon: RunningDaemon) -> None:
    """A client that leaves in mid-stream frees the engine at its next step."""
    before = tiny_daemon.status()["engine"]["generation_tokens"]
    connection, _ = begin(tiny_daemon)
    assert number_running(tiny_daemon) == 1
    connection.close()
    eventually(lambda: is_idle(tiny_daemon), 10)
    assert tiny_daemon.status()["engine"]["generation_tokens"] - before < 5000
    assert "finish=cancelled" in tiny_daemon.log().splitlines()[-1]


def test_disconnect_is_visible_within_one_step(smollm2_daemon: RunningDaemon) -> None:
    """With a real model's steps: no token is computed after the step that was under way."""
    connection, _ = smollm2_daemon.stream(
        {"messages": USER, "temperature": 0, "max_tokens": 500, "logit_bias": {"2": -100}}
    )
    eventually(lambda: smollm2_daemon.status()["engine"]["running"])
    connection.close()
    steps = smollm2_daemon.status()["engine"]["steps"]
    eventually(lambda: is_idle(smollm2_daemon), 10)
    # One step was under way when the connection closed, one more may have begun before
    # the loop heard of it, and one drops the sequence.
    assert smollm2_daemon.status()["engine"]["steps"] - steps <= 3


def test_whole_answer_disconnect_stops_the_generation(tiny_daemon: RunningDaemon) -> None:
    """Also a client that does not stream is missed when it leaves."""
    connection = tiny_daemon.send(LONG)
    eventually(lambda: number_running(tiny_daemon) == 1)
    connection.close()
    eventually(lambda: is_idle(tiny_daemon), 10)
    assert "finish=cancelled" in tiny_daemon.log().splitlines()[-1]


def test_disconnect_while_waiting(tiny_daemon: RunningDaemon) -> None:
    """A waiting request whose client leaves is never started."""
    first, _ = begin(tiny_daemon)
    second = tiny_daemon.send(LONG)
    eventually(lambda: tiny_daemon.status()["waiting"] == 1)
    second.close()
    eventually(lambda: tiny_daemon.status()["waiting"] == 0)
    assert number_running(tiny_daemon) == 1
    first.close()
    eventually(lambda: is_idle(tiny_daemon), 10)


def test_requests_of_a_conversation_stay_in_order(tiny_daemon: RunningDaemon) -> None:
    """First in, first out, for one conversation; all are answered.

    The daemon's log says in which order: which of this test's threads wakes first does not.
    """
    connection, _ = begin(tiny_daemon)
    replies: dict[int, Reply] = {}

    def ask(number: int) -> None:
        named = {"X-Umbel-Conversation": "one"}
        replies[number] = tiny_daemon.request("POST", CHAT, SHORT, named)

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=ask, args=(number,)))
        threads[-1].start()
        eventually(lambda n=number: tiny_daemon.status()["waiting"] == n + 1)
    connection.close()
    for thread in threads:
        thread.join(30)
    assert [replies[number].status for number in range(5)] == [200] * 5
    names = [replies[number].headers["x-request-id"] for number in range(5)]
    ended = re.findall(r"event=request .*?\brequest=(\S+)", tiny_daemon.log())
    assert [name for name in ended if name in names] == names


def test_keep_alive_comments_while_waiting(tiny_daemon: RunningDaemon) -> None:
    """A stream that waits its turn is kept alive by comments, and then answered."""
    first, _ = begin(tiny_daemon)
    second, response = tiny_daemon.stream(SHORT)
    lines = [response.readline() for _ in range(8)]
    assert lines.count(b": keep-alive\n") >= 2
    first.close()
    assert b"[DONE]" in response.read()
    second.close()


def test_slow_reader_is_cut_off(tiny_daemon: RunningDaemon) -> None:
    """A client that does not read loses its answer; others are served meanwhile."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(str(tiny_daemon.socket))
    many = {"logprobs": True, "top_logprobs": 20}  # events that are long
    body = msgspec.json.encode(LONG | many | {"stream": True, "max_tokens": 8000})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    eventually(lambda: is_idle(tiny_daemon) and "reading its answer" in tiny_daemon.log(), 60)
    connection.close()
    assert tiny_daemon.post(SHORT).status == 200


def test_queue_limit(short_path: Path, long_tiny_dir: Path) -> None:
    """More than may wait are refused with a 429 that says when to come back."""
    with running(
        short_path, long_tiny_dir, "--max-waiting", "2", *ONE, "--stop-grace", "0"
    ) as daemon:
        connection, _ = begin(daemon)
        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(daemon.post, SHORT) for _ in range(2)]
            eventually(lambda: daemon.status()["waiting"] == 2)
            refused = daemon.post(SHORT)
            assert refused.status == 429
            assert int(refused.headers["Retry-After"]) > 0
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            connection.close()
            assert [f.result(60).status for f in waiting] == [200, 200]
        metrics = daemon.request("GET", "/metrics").body.decode()
        assert 'umbel_refusals_total{reason="rate_limit_exceeded"} 1.0' in metrics


def test_burst_is_answered_or_refused(short_path: Path, long_tiny_dir: Path) -> None:
    """Two hundred requests at once all get an answer: 200 or 429, none is lost."""
    with running(short_path, long_tiny_dir, "--max-waiting", "50", *ONE) as daemon:
        with ThreadPoolExecutor(200) as pool:
            statuses = [r.status for r in pool.map(daemon.post, [SHORT] * 200)]
        assert set(statuses) <= {200, 429}
        assert statuses.count(200) >= 51
        assert is_idle(daemon)


def test_deadline(short_path: Path, long_tiny_dir: Path) -> None:
    """A request that takes longer than it may is ended, with words."""
    flags = ("--request-timeout", "0.2")
    with running(short_path, long_tiny_dir, *flags) as daemon:
        reply = daemon.post(LONG | {"max_tokens": 8000})
        assert reply.status == 504
        assert "ran when its time was over" in reply.json()["error"]["message"]


def test_a_request_names_its_own_deadline(tiny_daemon: RunningDaemon) -> None:
    """It is shorter than the daemon's."""
    body, headers = LONG | {"max_tokens": 8000}, {"X-Umbel-Timeout": "0.2"}
    reply = tiny_daemon.request("POST", CHAT, body, headers)
    assert reply.status == 504
    assert "when its time was over" in reply.json()["error"]["message"]


def test_sigterm_lets_running_requests_finish(short_path: Path, long_tiny_dir: Path) -> None:
    with (
        running(short_path, long_tiny_dir, *ONE, fresh=True) as daemon,
        ThreadPoolExecutor(2) as pool,
    ):
        connection, response = begin(daemon, max_tokens=1500)
        waiting = pool.submit(daemon.post, SHORT)
        eventually(lambda: daemon.status()["waiting"] == 1)
        daemon.process.send_signal(signal.SIGTERM)
        refused: Reply = waiting.result(30)
        assert refused.status == 503
        assert refused.headers["Retry-After"]
        assert daemon.post(SHORT).status == 503
        assert daemon.request("GET", "/ready").json() == {"status": "stopping"}
        rest = response.read()
        assert b'"finish_reason":"length"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        connection.close()
        assert daemon.process.wait(30) == 0
    assert not daemon.socket.exists()


def test_second_sigterm_cuts_the_grace_short(short_path: Path, long_tiny_dir: Path) -> None:
    """The stream ends with an error event instead of its rest."""
    with running(short_path, long_tiny_dir, fresh=True) as daemon:
        connection, response = begin(daemon, max_tokens=8000)
        daemon.process.send_signal(signal.SIGTERM)
        eventually(lambda: daemon.request("GET", "/ready").json()["status"] == "stopping")
        daemon.process.send_signal(signal.SIGTERM)
        rest = response.read()
        assert b"the daemon is stopping" in rest
        assert b"[DONE]" not in rest
        connection.close()
        assert daemon.process.wait(30) == 0


def test_ctrl_c_stops_it_too(short_path: Path, long_tiny_dir: Path) -> None:
    """Ctrl-C in the terminal ends the daemon as SIGTERM does."""
    with running(short_path, long_tiny_dir, fresh=True) as daemon:
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(30) == 0


IN_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Runs Python with its standard input as its controlling terminal."""


def test_closing_the_terminal_stops_it_too(short_path: Path, long_tiny_dir: Path) -> None:
    """The kernel tells by SIGHUP, and a daemon with a terminal takes that for its end."""
    ours, theirs = os.openpty()
    program = ("-c", IN_A_TERMINAL, *UMBEL)
    daemon = spawn(short_path, long_tiny_dir, program=program, terminal=theirs)
    os.close(theirs)
    try:
        eventually(lambda: is_ready(daemon), START)
    finally:
        os.close(ours)
        status = daemon.process.wait(STOP)
    assert status == 0
    assert "event=stopped" in daemon.log()
    assert "reloaded" not in daemon.log()


def test_requests_during_loading(short_path: Path) -> None:
    """While the model loads the daemon listens, says so, and can be stopped."""
    daemon = spawn(short_path, "smollm2", fresh=True)
    try:
        eventually(daemon.socket.exists)
        reply = daemon.post(SHORT)
        assert (reply.status, reply.json()["error"]["message"]) == (
            503,
            "the model is still loading",
        )
        assert daemon.request("GET", "/health").status == 200
        ready = daemon.request("GET", "/ready").json()
        assert ready["status"] == "loading"
        assert ready.get("phase") in (None, "loading", "measuring")
        assert daemon.status()["state"] == "loading"
    finally:
        assert daemon.terminate() == 0


def test_unknown_model_ends_the_daemon(short_path: Path) -> None:
    """A model that is not there is one sentence and exit status 1."""
    daemon = spawn(short_path, "no-such-model", fresh=True)
    assert daemon.process.wait(60) == 1
    assert "no model 'no-such-model'" in daemon.log()
    assert "Traceback" not in daemon.log()


def test_health_answers_while_the_engine_works(tiny_daemon: RunningDaemon) -> None:
    """Status requests do not wait for the MLX thread."""
    connection, _ = begin(tiny_daemon, max_tokens=8000)
    for route in ("/health", "/ready", "/status", "/metrics"):
        assert tiny_daemon.request("GET", route).status == 200
    assert number_running(tiny_daemon) == 1
    connection.close()


def test_log_line(tiny_daemon: RunningDaemon) -> None:
    """Each request leaves one line with the agreed keys, and none of its text."""
    keys = (
        "request tenant conversation total matched cached left ttft_ms itl_ms out finish "
        "queue_s prefill_s decode_s e2e_s"
    )
    for stream in (False, True):
        name = f"the-log-test-{stream}"
        body = {**SHORT, "stream": stream}
        tiny_daemon.request("POST", CHAT, body, {"X-Umbel-Conversation": name})
        line = eventually(lambda name=name: line_with(tiny_daemon, f"conversation={name} "))
        assert all(f" {key}=" in line for key in keys.split())
        assert "hello" not in line
        times = {key: float(time) for key, time in re.findall(r" (\w+_s)=(\S+)", line)}
        assert min(times.values()) >= 0
        total, waited = times.pop("e2e_s"), times.pop("waited_s")
        assert waited <= total
        assert round(sum(times.values()) * 1e3) <= round(total * 1e3)


def line_with(daemon: RunningDaemon, text: str) -> str | None:
    """The log's first line that has a text; a stream's is written just after its last byte."""
    return next((line for line in daemon.log().splitlines() if text in line), None)


def test_tcp_needs_no_key_on_loopback(tiny_daemon: RunningDaemon) -> None:
    """Loopback TCP serves, but not web pages, nor requests for another host's name."""
    port = tiny_daemon.tcp_port()

    def status(**headers: str) -> int:
        lines = "".join(
            f"{k}: {v}\r\n" for k, v in {"Host": f"127.0.0.1:{port}", **headers}.items()
        )
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.sendall(
                f"GET /v1/models HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode()
            )
            return int(connection.recv(4096).split()[1])

    assert status() == 200
    assert status(Host="evil.example") == 403
    assert status(Origin="http://evil.example") == 403
    assert status(Origin=f"http://localhost:{port}") == 200
    assert status(Host="127.0.0.1:99999") == 403
    assert status(Origin="http://[::1") == 403
    assert status(Origin="\xff") == 403


def test_tcp_with_a_key(short_path: Path, long_tiny_dir: Path) -> None:
    """With a key set TCP clients must send it; the Unix socket needs none."""
    env = {"UMBEL_API_KEY": "secret"}
    with running(short_path, long_tiny_dir, "--port", "0", env=env) as daemon:
        port = daemon.tcp_port()

        def status(header: str) -> int:
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{header}Connection: close\r\n\r\n"
                connection.sendall(head.encode())
                return int(connection.recv(4096).split()[1])

        assert status("") == 401
        assert status("Authorization: Bearer wrong\r\n") == 401
        assert status("Authorization: Bearer \xff\r\n") == 401
        assert status("Authorization: Bearer secret\r\n") == 200
        assert status("x-api-key: secret\r\n") == 200
        assert daemon.request("GET", "/v1/models").status == 200
        assert "secret" not in daemon.log()


@pytest.mark.slow
def test_idle_daemon_does_nothing(short_path: Path, long_tiny_dir: Path) -> None:
    """A daemon without work neither steps nor burns processor time."""
    with running(short_path, long_tiny_dir) as daemon:
        daemon.post(SHORT)

        def rests() -> bool:
            before = daemon.status()["engine"]["steps"]
            time.sleep(1)  # its last step may come after its answer, on a busy machine much later
            return bool(daemon.status()["engine"]["steps"] == before)

        eventually(rests)
        steps, used = daemon.status()["engine"]["steps"], _cpu_seconds(daemon.process.pid)
        time.sleep(3)
        assert daemon.status()["engine"]["steps"] == steps
        assert _cpu_seconds(daemon.process.pid) - used < 1.0


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
