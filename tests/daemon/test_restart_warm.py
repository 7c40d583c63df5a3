"""A daemon serves from its predecessor's state: after SIGTERM, and after SIGKILL."""

import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ..tiny import tiny_model_dir
from .running import RunningDaemon, eventually, running, spawn

SYSTEM = "You are a helpful assistant of the other agents. " * 30


def ask(daemon: RunningDaemon, user: str, tokens: int = 12) -> tuple[str, int]:
    """Ask greedily; returns the answer, and how many prompt tokens were cached."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    reply = daemon.post({"messages": messages, "max_tokens": tokens, "temperature": 0})
    assert reply.status == 200, reply.body
    body = reply.json()
    details = body["usage"]["prompt_tokens_details"]
    return body["choices"][0]["message"]["content"], details["cached_tokens"]


def on_disk(daemon: RunningDaemon) -> Any:
    """True if all computed state is written."""
    disk = daemon.status()["disk"]
    return disk["writes"] and not disk["queued_bytes"]


def killed(daemon: RunningDaemon, number: signal.Signals) -> None:
    """End a daemon in the way that is asked for."""
    daemon.process.send_signal(number)
    daemon.process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_next_daemon_is_warm(
    number: signal.Signals, short_path: Path, long_tiny_dir: Path
) -> None:
    """It says how much was cached, and answers as the first one did."""
    with running(short_path, long_tiny_dir) as first:
        answer, cached = ask(first, "What is the capital of France?")
        assert cached == 0
        if number == signal.SIGKILL:
            eventually(lambda: on_disk(first))
            time.sleep(0.3)
        killed(first, number)
    with running(short_path, long_tiny_dir, fresh=True) as second:
        again, cached = ask(second, "What is the capital of France?")
        assert cached > 300
        assert again == answer
        other, cached = ask(second, "What else is there?")
        assert cached > 300
        assert second.status()["engine"]["page_ins"] > 0
    with running(short_path, long_tiny_dir, "--no-disk") as third:
        assert ask(third, "What else is there?") == (other, 0)


@pytest.mark.slow
def test_ages_go_on_over_a_restart(short_path: Path, long_tiny_dir: Path) -> None:
    """The next daemon says since when state was not used, and not since when it runs itself."""
    pause = 5.0
    with running(short_path, long_tiny_dir) as first:
        ask(first, "What is the capital of France?")
        time.sleep(pause)
    with running(short_path, long_tiny_dir, fresh=True) as second:
        before = second.request("GET", "/cache/nodes").json()["nodes"]
        assert before
        assert all(node["tiers"] == ["disk"] for node in before)
        assert all(pause <= node["age"] < 3600 for node in before)
        ask(second, "What is the capital of France?")
        after = second.request("GET", "/cache/nodes").json()["nodes"]
        assert min(node["age"] for node in after) < min(node["age"] for node in before)


@pytest.mark.slow
def test_quantised_state_is_for_the_same_bits_only(short_path: Path, tmp_path: Path) -> None:
    """State of 8 bits comes back in a daemon with 8, and in no other; what cannot be says so."""
    model = tiny_model_dir(tmp_path / "wide", head_dim=32, max_position_embeddings=4096)

    def flags(bits: int) -> list[str]:
        return ["--kv-bits", str(bits), "--kv-group-size", "32"]

    with running(short_path, model, *flags(8)) as first:
        assert first.status()["model"]["batches"]
        answer, cached = ask(first, "What is the capital of France?")
        assert cached == 0
    with running(short_path, model, *flags(8), fresh=True) as again:
        same, cached = ask(again, "What is the capital of France?")
        assert (same, cached > 300) == (answer, True)
    for others in (flags(4), []):
        with running(short_path, model, *others, fresh=True) as other:
            assert ask(other, "What is the capital of France?")[1] == 0
    refused = spawn(short_path, model, "--kv-bits", "8")  # in groups of 64
    assert refused.process.wait(60) == 1
    assert "serve it without kv_bits" in refused.log()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_at_random_moments(
    number: signal.Signals, short_path: Path, long_tiny_dir: Path
) -> None:
    """Whatever was under way, the next daemon starts and its answers are right."""
    rng = random.Random(int(number))  # noqa: S311  (not a secret)
    users = [f"agent {i} asks about the report {i * 7}" for i in range(6)]
    with running(short_path, long_tiny_dir, "--no-disk") as plain:
        right = [ask(plain, user)[0] for user in users]
    flags = ("--cache-bytes", "24MiB")
    for _ in range(3):
        with running(short_path, long_tiny_dir, *flags) as daemon:
            answers = [ask(daemon, user)[0] for user in users[:2]]
            assert answers == right[:2]
            stop = threading.Event()

            def pester(user: str, daemon: Any = daemon, stop: Any = stop) -> None:
                while not stop.is_set():
                    with suppress(OSError, AssertionError):
                        ask(daemon, user + str(time.monotonic()), 200)

            with ThreadPoolExecutor(4) as pool:
                for user in users[:4]:
                    pool.submit(pester, user)
                time.sleep(rng.uniform(0.05, 1.5))
                killed(daemon, number)
                stop.set()
    with running(short_path, long_tiny_dir, *flags) as last:
        assert [ask(last, user)[0] for user in users] == right
        assert last.request("GET", "/cache/verify").json()["problems"] == []


@pytest.mark.nightly
def test_warm_is_ten_times_sooner(short_path: Path) -> None:
    """The first token over 2,000 cached tokens comes ten times sooner than over none."""
    story = " ".join(f"In year {i} the agent {i * 7 % 100} wrote report {i}." for i in range(135))

    def first_token(daemon: RunningDaemon, text: str) -> tuple[float, int]:
        began = time.perf_counter()
        reply = daemon.post(
            {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}
        )
        usage = reply.json()["usage"]
        assert usage["prompt_tokens"] > 1900
        return time.perf_counter() - began, usage["prompt_tokens_details"]["cached_tokens"]

    once = {"prompt": "Once ", "max_tokens": 1}
    with running(short_path, "smollm2", fresh=True) as first:
        assert first.post(once, "/v1/completions").status == 200
        cold, cached = first_token(first, story)
        assert cached < 100
        eventually(lambda: on_disk(first))
    with running(short_path, "smollm2", fresh=True) as second:
        assert second.post(once, "/v1/completions").status == 200
        warm, cached = first_token(second, story)
        assert cached > 1900
    print(f"warm {warm:.3f} s, cold {cold:.3f} s: {cold / warm:.1f} times")  # noqa: T201
    assert cold >= 10 * warm


@pytest.mark.slow
def test_two_daemons_do_not_share_a_folder(short_path: Path, long_tiny_dir: Path) -> None:
    """The second one says why it ends; without a disk it starts."""
    with running(short_path, long_tiny_dir) as first:
        (short_path / "b").mkdir()
        shared = {"UMBEL_DISK_DIR": str(short_path / "disk")}
        second = spawn(short_path / "b", long_tiny_dir, env=shared)
        assert second.process.wait(60) != 0
        assert str(short_path / "disk") in second.log()
        assert "--no-disk" in second.log()
        assert "event=loading" not in second.log(), "it was known before"
        assert "Traceback" not in second.log()
        with running(short_path / "b", long_tiny_dir, "--no-disk", env=shared) as third:
            assert ask(third, "Hello")[0] == ask(first, "Hello")[0]
            assert third.status()["disk"] is None
