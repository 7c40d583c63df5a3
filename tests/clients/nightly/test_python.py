"""Frameworks from PyPI: chat, stream, a tool that is called, and structured output."""

import json
from pathlib import Path
from typing import Any

import pytest

from ...daemon.running import RunningDaemon
from ..outside import installed, run
from ..scripted import call, plan
from ..tasks import CHAT, SAID, STRUCTURED, TOOLS, USED, WEATHER

pytestmark = pytest.mark.nightly

PROGRAMS = Path(__file__).parent / "programs"
FIELDS = WEATHER.model_dump()
TASKS = {
    "chat": CHAT,
    "tools": TOOLS,
    "structured": STRUCTURED,
    "call": plan(call("Weather", **FIELDS)),  # the schema as a tool
    # The tool and the form of code with which agents of smolagents end.
    "final_answer": plan(call("get_weather", city="Paris"), call("final_answer", answer=USED)),
    "code": plan("<code>\nfinal_answer('It says: ' + get_weather('Paris') + '.')\n</code>"),
}


def run_program(daemon: RunningDaemon, name: str, home: Path) -> Any:
    """Run one of `programs/` and read the JSON that it prints."""
    output = run(
        daemon,
        [installed("nightly-venv/bin/python"), str(PROGRAMS / name), json.dumps(TASKS)],
        home,
        URL=f"http://127.0.0.1:{daemon.tcp_port()}",
    )
    return json.loads(output)


def check_stream(pieces: list[str]) -> None:
    """Check that a text came in pieces, whole."""
    assert "".join(pieces) == SAID
    assert len(pieces) > 1


def test_instructor(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """Instructor reads its type from tools, JSON and a schema, and from a stream of JSON."""
    result = run_program(scripted_daemon, "instructor_client.py", tmp_path)
    stream = result.pop("stream")
    assert len(stream) > 1
    assert stream[0] != FIELDS
    assert stream[-1] == FIELDS
    forms = dict.fromkeys(("call", "structured", "schema", "responses"), FIELDS)
    assert result == {"chat": SAID, **forms}


def test_smolagents(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """Both agents of smolagents call the tool and end with its result."""
    result = run_program(scripted_daemon, "smolagents_client.py", tmp_path)
    check_stream(result.pop("stream"))
    assert result.pop("observed").endswith("21 degrees in Paris")
    assert result == {
        "chat": SAID,
        "tools": USED,
        "code": USED,
        "cities": ["Paris", "Paris"],
        "structured": FIELDS,
    }


def test_llama_index(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """An agent of llama-index uses the tool's result; structured output is a forced call."""
    result = run_program(scripted_daemon, "llama_index_client.py", tmp_path)
    check_stream(result.pop("stream"))
    assert result == {"chat": SAID, "tools": USED, "cities": ["Paris"], "call": FIELDS}


def test_langchain_anthropic(scripted_daemon: RunningDaemon, tmp_path: Path) -> None:
    """langchain-anthropic gets structured output as a forced call and by a schema."""
    result = run_program(scripted_daemon, "langchain_anthropic_client.py", tmp_path)
    check_stream(result.pop("stream"))
    forms = {"call": FIELDS, "structured": FIELDS}
    assert result == {"chat": SAID, "tools": USED, "cities": ["Paris"], **forms}
