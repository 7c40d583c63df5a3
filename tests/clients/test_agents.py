"""Coding agents, each through a task that takes tool calls or edits, offline."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ..daemon.running import RunningDaemon, eventually
from .outside import installed, requests_in, run
from .recipes import recipe
from .scripted import RESULT, UNPLANNED, call, plan

pytestmark = pytest.mark.nightly

TEXT = "written by an agent\n"
DONE = "All is done."


def run_recipe(
    daemon: RunningDaemon,
    title: str,
    program: str,
    arguments: list[str],
    home: Path,
    stdin: str = "",
    **environment: str,
) -> str:
    """Run the commands of a recipe, the last of which is the agent, with more arguments.

    The agent must make three requests at least, and the last one must find its prompt in the
    cache, all but its end.
    """
    before = len(requests_in(daemon.log()))
    output = run_commands(daemon, title, program, arguments, home, stdin, **environment)
    eventually(lambda: len(requests_in(daemon.log())) >= before + 3)
    requests = requests_in(daemon.log())[before:]
    assert all(request["finish"] != "error" for request in requests)
    largest = max(requests, key=lambda request: int(request["total"]))
    assert int(largest["total"]) > 2000
    assert int(largest["cached"]) > 0.9 * int(largest["total"])
    return output


def run_commands(
    daemon: RunningDaemon,
    title: str,
    program: str,
    arguments: list[str],
    home: Path,
    stdin: str = "",
    **environment: str,
) -> str:
    """Run the commands of a recipe, with `program` as what its last line calls."""
    lines = recipe(title, "sh", daemon).strip()
    (home / "bin").mkdir()
    (home / "bin" / lines.splitlines()[-1].split()[0]).symlink_to(program)
    environment |= {"SOCKET": str(daemon.socket), "PATH": f"{home}/bin:/usr/bin:/bin"}
    command = ["sh", "-euc", f'{lines} "$@"', "sh", *arguments]
    return run(daemon, command, home, stdin, **environment)


def test_claude_code(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """Claude Code over the Unix socket: it writes a file, runs a command and answers."""
    task = plan(
        call("Write", file_path=str(tmp_path / "made.txt"), content=TEXT),
        call("Bash", command="cp made.txt copied.txt", description="Copy the file"),
        DONE,
    )
    output = run_recipe(
        scripted_daemon,
        "Claude Code",
        installed("npm/node_modules/@anthropic-ai/claude-code-*/claude"),
        ["-p", task, "--allowedTools", "Write,Bash", "--output-format", "json"],
        tmp_path,
    )
    told = json.loads(output)
    assert (told["result"], told["num_turns"], told["is_error"]) == (DONE, 3, False)
    assert told["usage"]["cache_read_input_tokens"] > 0
    assert (tmp_path / "made.txt").read_text() == TEXT
    assert (tmp_path / "copied.txt").read_text() == TEXT


def run_codex(daemon: RunningDaemon, home: Path, task: str) -> list[dict[str, Any]]:
    """Run a task with Codex and return the events that it prints."""
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(recipe("Codex", "toml", daemon))
    output = run_recipe(
        daemon,
        "Codex",
        installed("npm/node_modules/@openai/codex-*/vendor/*/bin/codex"),
        # No sandbox: Codex's own takes rights that a container does not give.
        ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--json", task],
        home,
    )
    events = [json.loads(line) for line in output.splitlines()]
    assert events[-1]["type"] == "turn.completed"
    assert events[-1]["usage"]["cached_input_tokens"] > 0
    return events


def items_of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """List the items of a kind that were completed."""
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in items if item["type"] == kind]


def test_codex(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """Codex over TCP: it runs two commands and answers."""
    task = plan(
        call("exec_command", cmd=f"printf '{TEXT.strip()}\\n' > made.txt"),
        call("exec_command", cmd="cp made.txt copied.txt"),
        DONE,
    )
    events = run_codex(scripted_daemon, tmp_path, task)
    assert [item["exit_code"] for item in items_of(events, "command_execution")] == [0, 0]
    assert [item["text"] for item in items_of(events, "agent_message")] == [DONE]
    assert (tmp_path / "copied.txt").read_text() == TEXT


def test_codex_and_a_namespace(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """Codex finds a tool of a namespace when it is called: the tool's own words come back."""
    close = call("close_agent", target="ghost")
    events = run_codex(scripted_daemon, tmp_path, plan(close, close, RESULT))
    (item,) = items_of(events, "agent_message")
    assert item["text"].startswith("invalid agent id ghost")


def test_opencode(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """Opencode over TCP: it writes a file, runs a command and answers."""
    (tmp_path / "opencode.json").write_text(recipe("opencode", "json", scripted_daemon))
    task = plan(
        call("write", filePath=str(tmp_path / "made.txt"), content=TEXT),
        call("bash", command="cp made.txt copied.txt", description="Copy the file"),
        DONE,
    )
    output = run_recipe(
        scripted_daemon,
        "opencode",
        installed("npm/node_modules/opencode-*/bin/opencode"),
        ["run"],
        tmp_path,
        stdin=task,  # as an argument it would arrive in quotes, with all quotes in it escaped
        OPENCODE_DISABLE_MODELS_FETCH="1",
    )
    assert output.strip().endswith(DONE)
    assert (tmp_path / "made.txt").read_text() == TEXT
    assert (tmp_path / "copied.txt").read_text() == TEXT


def git(repo: Path, *words: str) -> str:
    """Run git in a repository beside a home that has no settings of it."""
    environment = {"HOME": str(repo.parent), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["git", *words], cwd=repo, env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def repository(folder: Path, **files: str) -> Path:
    """Make a git repository in which files are committed."""
    folder.mkdir()
    git(folder, "init", "--quiet")
    git(folder, "config", "user.name", "A person")
    git(folder, "config", "user.email", "person@localhost")
    for name, text in files.items():
        (folder / name).write_text(text)
    git(folder, "add", *files)
    git(folder, "commit", "--quiet", "--message", "Files")
    return folder


def test_aider(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """Aider over TCP: it edits a file as an answer says, and another answer names the commit.

    The plan stands in a file that it reads, so it is in the prompt of the edit and not in that of
    the commit's message.
    """
    repo = repository(tmp_path / "repo", made="written by a person\n")
    (tmp_path / "plan.md").write_text(plan(f"made\n```\n{TEXT}```"))
    (tmp_path / ".aider.model.metadata.json").write_text(recipe("aider", "json", scripted_daemon))
    before = len(requests_in(scripted_daemon.log()))
    output = run_commands(
        scripted_daemon,
        "aider",
        installed("aider/bin/aider"),
        [
            *("--yes-always", "--no-check-update", "--analytics-disable"),  # no user can answer
            *("--message", "Edit.", "--read", str(tmp_path / "plan.md"), "repo/made"),
        ],
        tmp_path,
        LITELLM_LOCAL_MODEL_COST_MAP="true",  # it would fetch them otherwise
    )
    assert "Applied edit to made" in output
    assert "Warning" not in output
    assert (repo / "made").read_text() == TEXT
    assert git(repo, "log", "-1", "--format=%s") == UNPLANNED
    requests = requests_in(scripted_daemon.log())[before:]
    assert [request["finish"] for request in requests] == ["stop", "stop"]
