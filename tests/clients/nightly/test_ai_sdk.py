"""The AI SDK with each of its providers that reach a server like umbel."""

import json
from pathlib import Path

import pytest

from ...daemon.running import RunningDaemon
from ..scripted import call, plan
from ..tasks import CHAT, SAID, STRUCTURED, TOOLS, USED, WEATHER
from .packages import node, package

pytestmark = pytest.mark.nightly

PROGRAM = Path(__file__).parent / "programs" / "ai_sdk.mjs"
TASKS = {
    "chat": CHAT,
    "tools": TOOLS,
    "structured": STRUCTURED,
    "json": plan(call("json", **WEATHER.model_dump())),  # its tool for structured output
}


def test_ai_sdk(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """Every provider does all tasks, and calls the tool with the city, streamed and not."""
    (tmp_path / "node_modules").symlink_to(Path(package("ai")).parent)
    program = tmp_path / PROGRAM.name
    program.write_text(PROGRAM.read_text())  # Node looks for packages beside a module
    results = json.loads(
        node(
            scripted_daemon,
            str(program),
            json.dumps(TASKS),
            home=tmp_path,
            URL=f"http://127.0.0.1:{scripted_daemon.tcp_port()}",
        )
    )
    assert set(results) == {"compatible", "chat", "responses", "messages"}
    for result in results.values():
        pieces = result.pop("stream")
        assert "".join(pieces) == SAID
        assert len(pieces) > 1
        assert result == {
            "chat": SAID,
            "tools": USED,
            "streamed_tools": USED,
            "cities": ["Paris", "Paris"],
            "structured": WEATHER.model_dump(),
        }
