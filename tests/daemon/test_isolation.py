"""Two tenants of one daemon: what one learns of the other, and what both may begin with."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from umbel.daemon.config import is_tenant_name
from umbel.daemon.errors import StartError
from umbel.daemon.models.loader import read_prompts

from .running import ANSWER, START, Reply, RunningDaemon, eventually, running, spawn

SECRET = "Meet me at the old mill after dark, and do not mention the parcel. " * 4
SYSTEM = "You are one of many agents that review what others have written, line by line. " * 8


def over_tcp(daemon: RunningDaemon, method: str, route: str, body: Any = None) -> Reply:
    """Send a request as another tenant than that of the Unix socket."""
    connection = HTTPConnection("127.0.0.1", daemon.tcp_port(), timeout=ANSWER)
    try:
        connection.request(method, route, None if body is None else msgspec.json.encode(body))
        response = connection.getresponse()
        return Reply(response.status, dict(response.headers), response.read())
    finally:
        connection.close()


def chat(user: str, system: str = "") -> dict[str, Any]:
    """Make the body of a short chat."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    return {"messages": messages, "max_tokens": 2, "temperature": 0}


def cached(reply: Reply) -> int:
    """How many tokens of a prompt were cached."""
    assert reply.status == 200, reply.body
    count: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_a_tenant_sees_its_own_nodes_and_the_operator_all(tiny_daemon: RunningDaemon) -> None:
    """Neither text nor counts of another's state; the daemon's own user sees whose it is."""
    over_tcp(tiny_daemon, "POST", "/cache/clear")
    tiny_daemon.post(chat(SECRET))
    own = over_tcp(tiny_daemon, "GET", "/cache/nodes").json()["nodes"]
    assert [node for node in own if not node["shared"]] == []
    shape = over_tcp(tiny_daemon, "GET", "/cache").json()
    assert (shape["tokens"], shape["nodes"], shape["span_bytes"]) == (0, 0, 0)
    assert not {"evictions", "page_outs"} & set(shape), "they are counted for all together"
    over_tcp(tiny_daemon, "POST", "/v1/chat/completions", chat("Hello there"))
    own = over_tcp(tiny_daemon, "GET", "/cache/nodes").json()["nodes"]
    assert {node["tenant"] for node in own if not node["shared"]} == {"default"}
    assert not any("old mill" in node["text"] for node in own)
    every = tiny_daemon.request("GET", "/cache/nodes").json()["nodes"]
    assert len({node["tenant"] for node in every}) >= 2
    all_of_it = tiny_daemon.request("GET", "/cache").json()
    assert all_of_it["tokens"] > 200
    assert {"evictions", "page_outs"} <= set(all_of_it)


def test_a_prompt_is_cached_for_whoever_sent_it(tiny_daemon: RunningDaemon) -> None:
    """`cached_tokens` of another tenant's prompt is that of a prompt never sent."""
    over_tcp(tiny_daemon, "POST", "/cache/clear")
    tiny_daemon.post(chat(SECRET))
    assert cached(tiny_daemon.post(chat(SECRET))) > 100, "so that the next line can fail"
    assert cached(over_tcp(tiny_daemon, "POST", "/v1/chat/completions", chat(SECRET))) == 0
    over_tcp(tiny_daemon, "POST", "/cache/clear")


def test_the_only_user_watches_over_tcp(tiny_daemon: RunningDaemon) -> None:
    """Without keys, tables and other addresses the client runs the daemon and sees all.

    What is stored of prompts stays apart all the same.
    """
    told = over_tcp(tiny_daemon, "GET", "/status").json()
    mine = tiny_daemon.status()
    for each in ("engine", "memory", "disk", "pressure", "ledger", "stored", "disk_budget"):
        assert (told[each] is None) == (mine[each] is None), each
    assert told["engine"]["steps"] == mine["engine"]["steps"]
    assert told["ledger"]["budget"] > 0
    page, own = (
        ask("GET", "/metrics").body.decode()
        for ask in (partial(over_tcp, tiny_daemon), tiny_daemon.request)
    )
    names = [set(re.findall(r"^(\w+)", text, re.MULTILINE)) for text in (page, own)]
    assert names[0] == names[1]
    assert "umbel_requests_running" in names[0]


def test_stored_responses_pins_and_conversations_are_ones_own(tiny_daemon: RunningDaemon) -> None:
    """Another tenant that knows their names finds nothing, and changes nothing."""
    stored = tiny_daemon.post({"input": SECRET, "max_output_tokens": 16}, "/v1/responses").json()
    name = stored["id"]
    assert tiny_daemon.request("GET", f"/v1/responses/{name}").status == 200
    assert over_tcp(tiny_daemon, "GET", f"/v1/responses/{name}").status == 404
    assert over_tcp(tiny_daemon, "GET", f"/v1/responses/{name}/input_items").status == 404
    assert over_tcp(tiny_daemon, "DELETE", f"/v1/responses/{name}").status == 404
    follow = {"input": "Go on", "previous_response_id": name, "max_output_tokens": 16}
    assert over_tcp(tiny_daemon, "POST", "/v1/responses", follow).status == 404
    assert tiny_daemon.post(follow, "/v1/responses").status == 200

    tiny_daemon.request(
        "POST", "/v1/chat/completions", chat("Hi"), {"X-Umbel-Conversation": "planets"}
    )
    pin = {"conversation": "planets"}
    refused = over_tcp(tiny_daemon, "POST", "/cache/pins", pin)
    assert refused.status == 409
    assert tiny_daemon.post(pin, "/cache/pins").status == 200
    assert over_tcp(tiny_daemon, "DELETE", "/cache/pins/planets").status == 404
    pins = over_tcp(tiny_daemon, "GET", "/cache/pins").json()["pins"]
    assert "planets" not in [each["name"] for each in pins]
    assert tiny_daemon.request("DELETE", "/cache/pins/planets").status == 200


def test_only_the_operator_shares_prompts(tiny_daemon: RunningDaemon) -> None:
    """Another tenant can declare nothing, nor take back what is declared."""
    pin = {"name": "agents", "system": SYSTEM, "shared": True}
    refused = over_tcp(tiny_daemon, "POST", "/cache/pins", pin)
    assert refused.status == 403
    assert refused.json()["error"]["code"] == "operator_only"
    assert over_tcp(tiny_daemon, "DELETE", "/cache/pins/agents?shared=true").status == 403
    both = {"conversation": "agents", "shared": True}
    assert tiny_daemon.post(both, "/cache/pins").status == 400
    assert tiny_daemon.request("DELETE", "/cache/pins/agents?shared=true").status == 404


@contextmanager
def agents_shared(daemon: RunningDaemon) -> Iterator[int]:
    """Share the system prompt for a while; yields how many tokens that are."""
    pin = daemon.post({"name": "agents", "system": SYSTEM, "shared": True}, "/cache/pins").json()
    assert pin["shared"]
    assert pin["held"] == pin["tokens"] > 100
    yield pin["tokens"]
    assert daemon.request("DELETE", "/cache/pins/agents?shared=true").status == 200


def test_a_shared_prompt_is_cached_for_everybody(tiny_daemon: RunningDaemon) -> None:
    """From each tenant's first request on; what follows it is each tenant's own."""
    with agents_shared(tiny_daemon) as tokens:
        first = chat(SECRET, SYSTEM)
        assert cached(tiny_daemon.post(first)) == tokens
        assert cached(tiny_daemon.post(first)) > tokens + 100
        assert cached(over_tcp(tiny_daemon, "POST", "/v1/chat/completions", first)) == tokens
        pins = over_tcp(tiny_daemon, "GET", "/cache/pins").json()["pins"]
        assert ("agents", True) in [(pin["name"], pin["shared"]) for pin in pins]
        nodes = over_tcp(tiny_daemon, "GET", "/cache/nodes").json()["nodes"]
        shared = [node for node in nodes if node["shared"]]
        assert max(node["end"] for node in shared) == tokens
        assert tiny_daemon.request("GET", "/cache/verify").json() == {"problems": []}
        refused = over_tcp(tiny_daemon, "GET", "/cache/verify")
        assert refused.status == 403
        assert refused.json()["error"]["code"] == "operator_only"
    assert cached(over_tcp(tiny_daemon, "POST", "/v1/chat/completions", first)) == 0
    over_tcp(tiny_daemon, "POST", "/cache/clear")


@pytest.mark.slow  # it starts daemons of its own
def test_a_shared_prompt_survives_a_restart(short_path: Path, long_tiny_dir: Path) -> None:
    """So does what each tenant has gone on to; the first request waits until it is read."""
    with running(short_path, long_tiny_dir, "--port", "0") as daemon:
        pin = daemon.post({"name": "a", "system": SYSTEM, "shared": True}, "/cache/pins").json()
        first = chat(SECRET, SYSTEM)
        over_tcp(daemon, "POST", "/v1/chat/completions", first)
        own = cached(over_tcp(daemon, "POST", "/v1/chat/completions", first))
        assert own > pin["tokens"] + 100
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
    with running(short_path, long_tiny_dir, "--port", "0", fresh=True) as daemon:
        assert cached(daemon.post(first)) == pin["tokens"]
        assert cached(over_tcp(daemon, "POST", "/v1/chat/completions", first)) == own


@pytest.mark.slow
def test_prompts_are_shared_by_configuration(short_path: Path, tiny_dir: Path) -> None:
    """From the first request on, without the line end of the file; and no more without it."""
    file = short_path / "reviewer.txt"
    file.write_text(SYSTEM.strip() + "\n")
    disk, flags = ("--disk-dir", str(short_path / "disk")), ("--port", "0")
    route = "/v1/chat/completions"
    with running(short_path, tiny_dir, *flags, *disk, "--shared-prompt", str(file)) as daemon:
        assert cached(over_tcp(daemon, "POST", route, chat("a", SYSTEM.strip()))) > 100
        assert cached(daemon.post(chat("b", SYSTEM.strip()))) > 100
        assert "prompt shared" in daemon.log()
    with running(short_path, tiny_dir, *flags, *disk) as daemon:
        assert "prompt not shared any more" in daemon.log()
        assert cached(over_tcp(daemon, "POST", route, chat("c", SYSTEM.strip()))) == 0


def test_a_stop_while_prompts_are_shared_leaves_nothing_unsaved(
    short_path: Path, long_tiny_dir: Path
) -> None:
    """State computed by then is written, and the disk tier is closed in order."""
    files = [short_path / "short.txt", short_path / "long.txt"]
    for file, times in zip(files, (10, 250), strict=True):
        file.write_text(f"{file.name} once upon a time. " * times)
    config, disk = short_path / "umbel.toml", short_path / "disk"
    config.write_text(f"shared_prompts = {[str(file) for file in files]}\nprefill_chunk = 16")
    daemon = spawn(short_path, long_tiny_dir, "--config", str(config))
    try:
        eventually(lambda: "name=file:short.txt" in daemon.log(), START)
        time.sleep(0.1)  # some of the long one is computed
        assert daemon.terminate() == 0
    finally:
        if daemon.process.poll() is None:
            daemon.process.kill()
    assert "name=file:long.txt" not in daemon.log()
    assert [path.name for path in disk.glob("*/index.sqlite*")] == ["index.sqlite"]


@pytest.mark.parametrize(("text", "words"), [(None, "cannot read"), ("\n", "is empty")])
def test_a_shared_prompt_that_cannot_be_read(tmp_path: Path, text: str | None, words: str) -> None:
    """The daemon says which file, and does not start."""
    file = tmp_path / "reviewer.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(StartError, match=f"shared_prompts: .*{words}"):
        read_prompts([str(file)])


def test_shared_prompts_have_names_of_their_own(tmp_path: Path) -> None:
    """Of two files of one name neither is taken for the other."""
    files = [tmp_path / folder / "reviewer.txt" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text("Be kind.\r\n")
    assert read_prompts([str(files[0])]) == {"file:reviewer.txt": "Be kind."}
    with pytest.raises(StartError, match="two files"):
        read_prompts(map(str, files))


@pytest.mark.parametrize("name", ["(shared)", "(anybody)"])
def test_nobody_is_called_as_what_is_shared(name: str) -> None:
    """A proxy, a table or a key that names such a tenant is refused."""
    assert not is_tenant_name(name)
