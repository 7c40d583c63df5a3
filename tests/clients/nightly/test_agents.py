"""Coding agents from npm: a file is written, a command runs, and the answer is streamed."""

import json
from pathlib import Path
from typing import Any

import pytest

from ...daemon.running import RunningDaemon
from ..scripted import call, plan
from ..tasks import CHAT, SAID, STRUCTURED, WEATHER
from .packages import node, package

pytestmark = pytest.mark.nightly

TEXT = "written by an agent\n"
DONE = "All is done."
COPY = "cp made.txt copied.txt"


def events_of(output: str) -> list[dict[str, Any]]:
    """Read one JSON object a line."""
    return [json.loads(line) for line in output.splitlines()]


def check_stream(pieces: list[str]) -> None:
    """Check that a text came in pieces, whole."""
    assert "".join(pieces) == SAID
    assert len(pieces) > 1


def check_files(folder: Path) -> None:
    """Check that the file was written, and copied by the command."""
    assert (folder / "made.txt").read_text() == TEXT
    assert (folder / "copied.txt").read_text() == TEXT


def test_qwen_code(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """Qwen Code streams a chat, works with files and the shell, and ends with its own schema."""

    def qwen(task: str, *options: str) -> list[dict[str, Any]]:
        output = node(
            scripted_daemon,
            package("@qwen-code/qwen-code/cli.js"),
            *("--auth-type", "openai", "--model", "default", "--yolo"),
            *("--output-format", "stream-json", *options, "--prompt", task),
            home=tmp_path,
            OPENAI_API_KEY="unused",
            OPENAI_BASE_URL=f"http://127.0.0.1:{scripted_daemon.tcp_port()}/v1",
        )
        events = events_of(output)
        assert (events[-1]["type"], events[-1]["is_error"]) == ("result", False)
        return events

    events = qwen(CHAT, "--include-partial-messages")
    assert events[-1]["result"] == SAID
    deltas = [event["event"].get("delta", {}) for event in events if "event" in event]
    check_stream([delta["text"] for delta in deltas if delta.get("type") == "text_delta"])

    write = call("write_file", file_path=str(tmp_path / "made.txt"), content=TEXT)
    shell = call("run_shell_command", command=COPY, is_background=False)
    assert qwen(plan(write, shell, DONE))[-1]["result"] == DONE
    check_files(tmp_path)

    fields = WEATHER.model_dump()
    schema = json.dumps(type(WEATHER).model_json_schema())
    events = qwen(plan(call("structured_output", **fields)), "--json-schema", schema)
    assert events[-1]["structured_result"] == fields


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_continue(scripted_daemon: RunningDaemon, tmp_path: Path, provider: str) -> None:
    """Continue's CLI chats, works with files and the shell, and prints an answer in JSON."""
    model = {
        "name": "umbel",
        "provider": provider,
        "model": "default",
        "apiKey": "unused",
        "apiBase": f"http://127.0.0.1:{scripted_daemon.tcp_port()}/v1",
        "roles": ["chat"],
        "capabilities": ["tool_use"],
    }
    settings = {"name": "nightly", "version": "1.0.0", "schema": "v1", "models": [model]}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML

    def cn(task: str, *options: str) -> str:
        return node(
            scripted_daemon,
            package("@continuedev/cli/dist/cn.js"),
            *("--config", "config.yaml", "--auto", *options, "--print", task),
            home=tmp_path,
        ).strip()

    assert cn(CHAT) == SAID
    assert json.loads(cn(STRUCTURED, "--format", "json")) == WEATHER.model_dump()
    write = call("Write", filepath=str(tmp_path / "made.txt"), content=TEXT)
    assert cn(plan(write, call("Bash", command=COPY), DONE)) == DONE
    check_files(tmp_path)


@pytest.mark.parametrize("api", ["openai-completions", "openai-responses", "anthropic-messages"])
def test_pi(scripted_daemon: RunningDaemon, tmp_path: Path, api: str) -> None:
    """The agent pi streams a chat and works with files and the shell, in three protocols."""
    base = f"http://127.0.0.1:{scripted_daemon.tcp_port()}"
    provider = {
        "baseUrl": base if api == "anthropic-messages" else f"{base}/v1",
        "api": api,
        "apiKey": "unused",
        "models": [{"id": "default", "contextWindow": 32_768, "maxTokens": 1024}],
    }
    (tmp_path / ".pi" / "agent").mkdir(parents=True)
    (tmp_path / ".pi" / "agent" / "models.json").write_text(
        json.dumps({"providers": {"umbel": provider}})
    )

    def pi(task: str) -> list[dict[str, Any]]:
        output = node(
            scripted_daemon,
            package("@mariozechner/pi-coding-agent/dist/cli.js"),
            *("--provider", "umbel", "--model", "default", "--offline", "--no-session"),
            *("--mode", "json", "--print", task),
            home=tmp_path,
        )
        return events_of(output)

    def said(events: list[dict[str, Any]]) -> str:
        assert events[-1]["type"] == "agent_end"
        parts = events[-1]["messages"][-1]["content"]
        return "".join(part["text"] for part in parts if part["type"] == "text")

    events = pi(CHAT)
    assert said(events) == SAID
    updates = [event.get("assistantMessageEvent", {}) for event in events]
    check_stream([update["delta"] for update in updates if update.get("type") == "text_delta"])

    write = call("write", path="made.txt", content=TEXT)
    assert said(pi(plan(write, call("bash", command=COPY), DONE))) == DONE
    check_files(tmp_path)
