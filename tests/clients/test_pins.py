"""Pins and clearing, as an operator uses them: the commands, and the routes under them."""

from pathlib import Path
from typing import Any

import pytest

from ..daemon.running import RunningDaemon, eventually, running
from .test_cache import cached, emptied, umbel

SYSTEM = "You are one of many agents, and you answer briefly. " * 12


@pytest.fixture
def daemon(plain_daemon: RunningDaemon) -> RunningDaemon:
    """A daemon with an empty cache, and no pins."""
    emptied(plain_daemon)
    assert pins(plain_daemon) == []
    return plain_daemon


def ask(daemon: RunningDaemon, question: str, conversation: str = "") -> Any:
    """Ask something under the system prompt."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 3}
    headers = {"X-Umbel-Conversation": conversation} if conversation else {}
    return daemon.request("POST", "/v1/chat/completions", body, headers).json()


def pins(daemon: RunningDaemon) -> list[Any]:
    """The daemon's pins."""
    found: list[Any] = daemon.request("GET", "/cache/pins").json()["pins"]
    return found


def test_a_pinned_system_prompt_stays(short_path: Path, long_tiny_dir: Path) -> None:
    """It is computed when it is pinned, survives clearing and a restart, and can be let go."""
    (short_path / "system.txt").write_text(SYSTEM)
    with running(short_path, long_tiny_dir) as daemon:
        done = umbel(daemon, "cache", "pin", str(short_path / "system.txt"))
        assert done.returncode == 0, done.stderr
        (pin,) = pins(daemon)
        assert (pin["name"], pin["held"]) == ("system.txt", pin["tokens"])
        assert f"system.txt: {pin['held']} of {pin['tokens']} tokens stay" in done.stdout
        assert cached(ask(daemon, "one")) == pin["tokens"]
        assert umbel(daemon, "cache", "clear").returncode == 0
        eventually(lambda: daemon.status()["engine"]["cache"]["tokens"] == pin["tokens"])
        assert cached(ask(daemon, "two")) == pin["tokens"]
    with running(short_path, long_tiny_dir, fresh=True) as successor:
        eventually(lambda: pins(successor) == [pin])
        assert successor.request("POST", "/cache/clear").status == 200
        assert cached(ask(successor, "three")) == pin["tokens"]
        assert umbel(successor, "cache", "unpin", "system.txt").returncode == 0
        assert umbel(successor, "cache", "clear").returncode == 0
        assert cached(ask(successor, "four")) == 0
        assert successor.request("GET", "/cache/verify").json() == {"problems": []}


def test_a_conversation_is_pinned_by_its_name(daemon: RunningDaemon) -> None:
    """A pinned conversation stays when the cache is cleared."""
    first = ask(daemon, "one", "talk")
    done = umbel(daemon, "cache", "pin", "--conversation", "talk")
    assert done.returncode == 0, done.stderr
    umbel(daemon, "cache", "clear")
    again = ask(daemon, "one", "talk")
    assert cached(again) == first["usage"]["prompt_tokens"] - 1
    assert "pinned: talk" in umbel(daemon, "cache", "stats").stdout
    assert daemon.request("DELETE", "/cache/pins/talk").status == 200
    assert pins(daemon) == []


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((), 2, "name a file"),
        (("nowhere.txt",), 1, "cannot read nowhere.txt"),
        (("--conversation", "unknown"), 1, "no conversation 'unknown'"),
    ],
)
def test_what_cannot_be_pinned_is_said(
    daemon: RunningDaemon, words: tuple[str, ...], status: int, said: str
) -> None:
    """A command that pins nothing says why, and fails; a wrong command line is status 2."""
    done = umbel(daemon, "cache", "pin", *words)
    assert done.returncode == status
    assert said in done.stderr
    assert pins(daemon) == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"system": "x"}, 400),
        ({"name": "x", "system": "x", "conversation": "y"}, 400),
        ({"name": "x", "text": "x"}, 400),
        ({"conversation": "unknown"}, 409),
    ],
)
def test_bad_pins_are_refused(daemon: RunningDaemon, body: dict[str, Any], status: int) -> None:
    """The body is checked, and what cannot be pinned is a conflict."""
    reply = daemon.request("POST", "/cache/pins", body)
    assert reply.status == status
    assert reply.json()["error"]["message"]


def test_an_unknown_pin_is_not_let_go(daemon: RunningDaemon) -> None:
    """Unpinning what is not pinned is an error that says so."""
    done = umbel(daemon, "cache", "unpin", "nothing")
    assert done.returncode == 1
    assert "no pin 'nothing'" in done.stderr
