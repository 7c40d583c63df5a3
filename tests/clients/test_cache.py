"""The cache as clients and operators see it."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ..daemon import command
from ..daemon.running import RunningDaemon, eventually, running

SYSTEM = "You are one of many agents. " * 20


@pytest.fixture
def daemon(plain_daemon: RunningDaemon) -> RunningDaemon:
    """A daemon whose cache is empty."""
    emptied(plain_daemon)
    return plain_daemon


def emptied(daemon: RunningDaemon) -> None:
    """Clear the cache; state that is just being written goes when that is done."""

    def is_empty() -> bool:
        assert daemon.request("POST", "/cache/clear").status == 200
        return bool(daemon.request("GET", "/cache").json()["tokens"] == 0)

    eventually(is_empty)


def ask(daemon: RunningDaemon, *turns: str) -> Any:
    """Send a conversation and return the answer's body."""
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
    return daemon.post({"messages": messages, "temperature": 0, "max_tokens": 5}).json()


def cached(answer: Any) -> int:
    """The cached tokens that the answer reports."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def umbel(daemon: RunningDaemon, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command against the daemon."""
    to_it = ("--socket", str(daemon.socket))
    return command.umbel(*words, *to_it, folder=daemon.folder, columns=100)


def test_agents_share_their_system_prompt(daemon: RunningDaemon) -> None:
    """The second agent's system prompt comes from the cache; the usage and the log say so."""
    first, second = ask(daemon, "one"), ask(daemon, "two")
    assert cached(first) == 0
    assert cached(second) > 0.8 * second["usage"]["prompt_tokens"]
    line = daemon.log().strip().splitlines()[-1]
    total, left = (
        second["usage"]["prompt_tokens"],
        second["usage"]["prompt_tokens"] - cached(second),
    )
    assert f" total={total} matched={cached(second)} cached={cached(second)} left={left} " in line


def test_a_conversation_resumes_at_its_end(daemon: RunningDaemon) -> None:
    """A second turn computes what is new, and an exact repeat one token."""
    first = ask(daemon, "one")
    repeat = ask(daemon, "one")
    assert cached(repeat) == first["usage"]["prompt_tokens"] - 1
    assert repeat["choices"] == first["choices"]
    text = first["choices"][0]["message"]["content"]
    assert cached(ask(daemon, "one", text, "two")) >= first["usage"]["prompt_tokens"]


def test_status_and_metrics_have_the_cache(daemon: RunningDaemon) -> None:
    """The trie's shape is in /status; its bytes are in /metrics."""
    ask(daemon, "one")
    ask(daemon, "two")
    shape = daemon.status()["engine"]["cache"]
    assert shape["nodes"] >= 3
    assert shape["leases"] == 0
    metrics = daemon.request("GET", "/metrics").body.decode()
    assert f'umbel_cache_bytes{{kind="kv",tier="memory"}} {float(shape["span_bytes"])}' in metrics
    assert "umbel_prompt_tokens_cached_total" in metrics


def test_a_node_says_whose_text_it_is(daemon: RunningDaemon) -> None:
    """A node has its first words, the conversations that go through it, and where it lies."""
    for name in ("moons", "planets", "rings", "comets"):
        body = {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"{name} \x1b[31mred"},
            ],
            "max_tokens": 2,
        }
        headers = {"X-Umbel-Conversation": name}
        assert daemon.request("POST", "/v1/chat/completions", body, headers).status == 200
    nodes = daemon.request("GET", "/cache/nodes").json()["nodes"]
    shared, *own = nodes
    assert shared["text"].startswith("system You are one of many agents.")
    assert len(shared["text"]) <= 64
    assert shared["conversations"] == ["comets", "rings", "planets"]
    assert shared["others"] >= 1
    assert shared["tiers"][0] == "memory"
    assert 0 <= shared["age"] < 3600
    leaves = [node for node in own if not node["children"]]
    assert {name for node in leaves for name in node["conversations"]} >= {"moons", "comets"}
    assert "\x1b" not in "".join(node["text"] for node in nodes)
    assert "\\x1b[31mred" in "".join(node["text"] for node in nodes)


def test_cache_commands(daemon: RunningDaemon) -> None:
    """`umbel cache` shows shape and nodes, and verifies the invariants."""
    ask(daemon, "one")
    ask(daemon, "two")
    stats = umbel(daemon, "cache", "stats")
    assert stats.returncode == 0
    nodes = daemon.status()["engine"]["cache"]["nodes"]
    assert f"tokens in {nodes} nodes" in stats.stdout
    assert "0 running requests" in stats.stdout
    listed = umbel(daemon, "cache", "ls").stdout.splitlines()
    assert len(listed) == nodes + 1
    assert listed[1].startswith("[0, ")
    assert listed[2].startswith("  [")
    head = [listed[0].index(word) for word in ("lies in", "used ago", "text")]
    first = listed[1]
    assert "memory" in first[head[0] : head[1]]
    assert re.search(r"\d+ (s|min)$", first[: head[1] + len("used ago")])
    assert first[head[2] :].startswith("system You are one of many agents.")
    verified = umbel(daemon, "cache", "verify")
    assert (verified.returncode, verified.stdout) == (0, "the cache is sound\n")


def test_cache_commands_without_a_daemon(tmp_path: Path) -> None:
    """Without a daemon they say so, in one sentence."""
    words = ("cache", "stats", "--socket", str(tmp_path / "no"))
    done = command.umbel(*words, folder=tmp_path)
    assert done.returncode == 1
    assert "no daemon answers on" in done.stderr


def test_no_cache(short_path: Path, long_tiny_dir: Path) -> None:
    """With --no-cache nothing is kept and nothing restored."""
    with running(short_path, long_tiny_dir, "--no-cache") as daemon:
        first, second = ask(daemon, "one"), ask(daemon, "one")
        assert cached(second) == 0
        assert first["choices"] == second["choices"]
        assert daemon.status()["engine"]["cache"]["nodes"] == 0


def test_small_budget_is_kept(short_path: Path, long_tiny_dir: Path) -> None:
    """All state stays within --cache-bytes; answers stay the same."""
    with running(short_path, long_tiny_dir, "--cache-bytes", "3MiB", "--no-disk") as daemon:
        questions = [f"{i % 5} " + "question " * 200 for i in range(15)]
        answers = [ask(daemon, question)["choices"] for question in questions]
        assert answers[:5] == answers[5:10] == answers[10:]
        status = daemon.status()
        engine = status["engine"]
        assert 0 < engine["cache"]["span_bytes"] <= status["ledger"]["budget"] == 3 * 2**20
        assert engine["cache"]["evictions"] > 0


def test_interrupted_requests_leave_no_lease(daemon: RunningDaemon) -> None:
    """A client that leaves in mid-stream leaves its state, and no hold on it."""
    connection, response = daemon.stream(
        {
            "messages": [{"role": "user", "content": "hello"}],
            "temperature": 0,
            "max_tokens": 3000,
        }
    )
    for _ in range(40):
        response.readline()
    connection.close()
    for _ in range(200):
        shape = daemon.request("GET", "/cache").json()
        if not shape["leases"]:
            break
    assert shape["leases"] == 0
    assert shape["tokens"] > 20
    assert daemon.request("GET", "/cache/verify").json() == {"problems": []}
