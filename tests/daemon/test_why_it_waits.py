"""Each request that runs or waits says why, in `/status`, `umbel ps` and the log."""

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

from ..tiny import tiny_model_dir
from .command import umbel
from .running import RunningDaemon, eventually, running


def requests(daemon: RunningDaemon) -> dict[str, dict[str, Any]]:
    """All of the model, by conversation."""
    (model,) = daemon.status()["models"]
    return {row["conversation"]: row for row in model["requests"]}


def body(tokens: int) -> dict[str, Any]:
    """A question whose answer has so many tokens: a greedy one does not end before."""
    messages = [{"role": "user", "content": "x"}]
    return {"messages": messages, "max_tokens": tokens, "temperature": 0}


def ask(daemon: RunningDaemon, conversation: str, tokens: int) -> threading.Thread:
    """Send a request from a thread of its own, and see it there."""
    headers = {"X-Umbel-Conversation": conversation}
    before = len(daemon.status()["models"][0]["requests"])
    thread = threading.Thread(
        target=daemon.request, args=("POST", "/v1/chat/completions", body(tokens), headers)
    )
    thread.start()
    eventually(lambda: len(daemon.status()["models"][0]["requests"]) == before + 1)
    return thread


def test_it_says_what_each_waits_for(short_path: Path) -> None:
    """The one slot, and the conversation; with the time of it, and what ran before."""
    model = tiny_model_dir(short_path / "tiny", max_position_embeddings=1 << 15)
    with (
        running(short_path, model, "--max-batch", "1") as daemon,
        # It runs until its client leaves, after `umbel ps`. Nothing is streamed: a stream that
        # is not read is given up after some thousand tokens.
        closing(daemon.send(body(30_000), {"X-Umbel-Conversation": "runs"})) as first,
    ):
        eventually(lambda: requests(daemon).get("runs", {}).get("activity") == "decode")
        threads = [ask(daemon, "waits", 2), ask(daemon, "runs", 2)]
        eventually(lambda: requests(daemon)["waits"]["seconds"]["slot"] > 0.05)
        rows = daemon.status()["models"][0]["requests"]
        assert [(row["conversation"], row["activity"]) for row in rows] == [
            ("runs", "decode"),
            ("waits", "slot"),
            ("runs", "conversation"),
        ]
        assert rows[0]["seconds"].keys() >= {"prefill", "decode"}
        done = umbel("ps", "--socket", str(daemon.socket), folder=short_path)
        assert (done.returncode, done.stderr) == (0, "")
        said, _, head, *lines = done.stdout.splitlines()
        assert said == "1 running, 2 in the queue"
        assert head.split()[:5] == ["request", "conversation", "tenant", "priority", "doing"]
        assert [line.split()[0] for line in lines] == [row["request"] for row in rows]
        assert " no slot " in lines[1]
        assert " behind its conversation " in lines[2]
        first.close()
        for thread in threads:
            thread.join()
        log = daemon.log()
    ended = [line for line in log.splitlines() if "event=request" in line]
    assert len(ended) == 3
    waited = [line.partition("waited_for=")[2].split()[0] for line in ended]
    assert waited.count("conversation") == 1
    assert "slot" in waited
