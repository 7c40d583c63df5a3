"""docs/clients.md: what it says of versions, and the recipes that this process can run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from ..daemon.running import RunningDaemon
from .outside import ROOT, run
from .recipes import PAGE, recipe
from .scripted import UNPLANNED
from .tasks import CHAT, SAID

PACKAGES = {
    "Claude Code": "@anthropic-ai/claude-code-linux-x64",
    "Codex": "@openai/codex-linux-x64",
    "opencode": "opencode-linux-x64-baseline",
    "pydantic-ai": "pydantic-ai-slim",
    "aider": "aider-chat",
}
UNTESTED = {"curl": "any", "Zed": "-"}
LOCKS = ("tests/clients/aider.lock", "tests/clients/requirements.lock", "requirements.lock")


def locked() -> dict[str, str]:
    """Read the versions that the tests run with; umbel's own lock has the SDKs, and comes last."""
    pins: dict[str, str] = {}
    for lock in LOCKS:
        text = (ROOT / lock).read_text()
        pins |= dict(re.findall(r"^([\w-]+)==([\w.]+)", text, re.MULTILINE))
    agents = json.loads((ROOT / "tests/clients/npm/package-lock.json").read_text())["packages"]
    return {
        name.removeprefix("node_modules/"): package["version"].removesuffix("-linux-x64")
        for name, package in agents.items()
        if name
    } | pins


def test_versions_are_those_of_the_locks() -> None:
    """Each row of the table has the version that is tested, or says that none is."""
    rows = re.findall(r"^\| \[([^\]]+)\]\(#[\w-]+\) \| (\S+) \|", PAGE, re.MULTILINE)
    assert len(rows) == 13
    versions = locked() | UNTESTED
    assert [(name, versions[PACKAGES.get(name, name)]) for name, _ in rows] == rows


def test_openai(scripted_daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of OpenAI's recipe gets an answer."""
    client = made_by("OpenAI's SDK", scripted_daemon, monkeypatch)
    with client:
        answer = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": CHAT}]
        )
    assert answer.choices[0].message.content == SAID


def test_anthropic(scripted_daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of Anthropic's recipe gets an answer."""
    client = made_by("Anthropic's SDK", scripted_daemon, monkeypatch)
    with client:
        answer = client.messages.create(
            model="default", max_tokens=100, messages=[{"role": "user", "content": CHAT}]
        )
    assert answer.content[0].text == SAID


def made_by(title: str, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a recipe's lines here and return the client that they make."""
    monkeypatch.setenv("SOCKET", str(daemon.socket))
    names: dict[str, Any] = {}
    exec(recipe(title, "python", daemon), names)  # noqa: S102  (a page of this repository)
    return names["client"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """Curl's recipe gets an answer."""
    command = ["sh", "-euc", recipe("curl", "sh", scripted_daemon)]
    output = run(scripted_daemon, command, tmp_path, SOCKET=str(scripted_daemon.socket))
    assert json.loads(output)["choices"][0]["message"]["content"] == UNPLANNED
