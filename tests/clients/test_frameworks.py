"""Clients from PyPI, each in a process of its own: chat, stream, tools, structured output."""

import json
import shlex
from pathlib import Path

import pytest

from ..daemon.running import RunningDaemon
from .outside import MODEL, installed, run, run_program
from .recipes import recipe
from .scripted import call, plan
from .tasks import CHAT, SAID, STRUCTURED, TOOLS, USED, WEATHER

FIELDS = WEATHER.model_dump()
TASKS = {
    "chat": CHAT,
    "tools": TOOLS,
    "structured": STRUCTURED,
    "final_result": plan(call("final_result", **FIELDS)),  # pydantic-ai's own tool
}
EXPECTED: dict[str, object] = {"chat": SAID, "tools": USED, "structured": FIELDS}
TITLES = {
    "pydantic_ai_client.py": "pydantic-ai",
    "langchain_client.py": "LangChain",
    "openai_agents_client.py": "openai-agents",
    "litellm_client.py": "litellm",
}
MORE: dict[str, dict[str, object]] = {
    "pydantic_ai_client.py": {"final_result": FIELDS, "responses": USED},
    "langchain_client.py": {},
    "openai_agents_client.py": {"responses": USED},
    "litellm_client.py": {"messages": USED},
}


@pytest.mark.slow
def test_sdks_over_tcp(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """The clients of OpenAI and Anthropic, asynchronous, need no transport of their own on TCP."""
    result = run_program(scripted_daemon, "sdk_clients.py", tmp_path, TASKS, ours=True)
    assert result == {"chat": USED, "responses": USED, "messages": USED}


@pytest.mark.nightly
@pytest.mark.parametrize("program", MORE)
def test_framework(scripted_daemon: RunningDaemon, tmp_path: Path, program: str) -> None:
    """The framework does all its tasks."""
    lines = recipe(TITLES[program], "python", scripted_daemon)
    result = run_program(scripted_daemon, program, tmp_path, TASKS, recipe=lines)
    pieces = result.pop("stream")
    assert "".join(pieces) == SAID
    assert len(pieces) > 1
    assert result == EXPECTED | MORE[program]


LLM_TOOL = """
def get_weather(city: str) -> str:
    "Tell the weather of a city."
    return f"21 degrees in {city}"
"""


@pytest.mark.nightly
def test_llm(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """`llm` with the daemon among its models: chat, streamed or not, tools, a schema."""
    settings = recipe("llm", "yaml", scripted_daemon)
    (tmp_path / "extra-openai-models.yaml").write_text(settings)
    command = [installed("venv/bin/llm"), "-m", "umbel"]

    def llm(*arguments: str) -> str:
        output = run(scripted_daemon, [*command, *arguments], tmp_path, LLM_USER_PATH=str(tmp_path))
        return output.strip()

    assert llm(CHAT) == llm("--no-stream", CHAT) == SAID
    assert llm("--functions", LLM_TOOL, TOOLS) == USED
    assert json.loads(llm("--schema", "city, degrees int", STRUCTURED)) == FIELDS


@pytest.mark.nightly
def test_llm_without_settings(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """`llm openai endpoint` needs an address only, and speaks both of OpenAI's protocols."""
    words = shlex.split(recipe("llm", "sh", scripted_daemon))
    assert words[0] == "llm"
    endpoint = [installed("venv/bin/llm"), *words[1:-1]]

    def llm(*arguments: str) -> str:
        output = run(
            scripted_daemon, [*endpoint, *arguments], tmp_path, LLM_USER_PATH=str(tmp_path)
        )
        return output.strip()

    assert llm("--models") == MODEL
    assert llm(CHAT) == SAID
    assert llm("--functions", LLM_TOOL, TOOLS) == USED
    assert llm("--functions", LLM_TOOL, "--responses", TOOLS) == USED
