"""Daemons with published tokenizers and templates: every way of asking, over HTTP."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ..daemon.running import RunningDaemon
from ..dialects import ROUTES, Heard, Question, ask
from ..published import NOTHING, ORDER, published_model_dir
from .conftest import scripted
from .outside import run_program
from .recipes import recipe
from .scripted import call, plan, thought
from .tasks import CHAT, STRUCTURED, USED, WEATHER
from .tasks import TOOLS as TOOLS_TASK

pytestmark = pytest.mark.nightly

AT_ONCE = 16  # requests, which is what the engine takes into one batch
TOOLS = {"order": ORDER, "ping": NOTHING}
ORDERED = {"dish": "a <b>", "count": 2}
FORMATS = {"text": None, "json_object": True, "json_schema": ORDER}
CHOICES = ("none", "auto", "required", "ping")
Asked = tuple[str, Question, Heard]
"""A request's name, its body, and its expected answer."""


def ways(switched: tuple[bool | None, ...], *, thinks: bool) -> Iterator[Asked]:
    """All ways of asking: each asks for the right answer, after a thought where that may be.

    Where an answer may be a call or something else, both are asked for; and where a call must be
    made, its repetition, too.
    """
    for choice, strict, form, thinking in product(CHOICES, (False, True), FORMATS, switched):
        text = "Hello there" if form == "text" else json.dumps(ORDERED)
        name, arguments = ("ping", {}) if choice == "ping" else ("order", ORDERED)
        ends: dict[str, tuple[list[Any], Heard]] = {}
        if choice in ("none", "auto"):
            ends["text"] = [text], Heard(text=text, end="stop")
        if choice != "none":
            made = call(name, **arguments)
            again = [made, made] if choice in ("required", "ping") else [made]
            ends["call"] = again, Heard(calls=[(name, arguments)], end="calls")
        for end, (steps, heard) in ends.items():
            heard.thoughts = "Hm." if thinks and thinking is not False else ""
            thoughts = [thought(heard.thoughts)] if heard.thoughts else []
            prompt, schema = plan([*thoughts, *steps]), FORMATS[form]
            asked = Question(prompt, TOOLS, choice, strict, schema=schema, thinking=thinking)
            yield f"{choice} strict={strict} {form} thinking={thinking} {end}", asked, heard


def faults(daemon: RunningDaemon, asked: list[tuple[Asked, str, bool]]) -> list[Any]:
    """Ask all, several at once; return which answers are not as they must be."""

    def one(each: tuple[Asked, str, bool]) -> Any:
        (name, question, wanted), dialect, stream = each
        heard = ask(daemon, dialect, question, stream=stream)
        heard.thoughts, heard.text = heard.thoughts.strip(), heard.text.strip()
        return None if heard == wanted else (name, dialect, stream, heard)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [fault for fault in pool.map(one, asked) if fault is not None]


def spoken(asked: Asked, dialect: str) -> bool:
    """Return True if a protocol can ask the question."""
    return dialect != "messages" or asked[1].schema is not True


def every(asked: list[Asked]) -> list[tuple[Asked, str, bool]]:
    """Ask in each protocol, streamed and not."""
    each = product(asked, ROUTES, (False, True))
    return [one for one in each if spoken(one[0], one[1])]


def one_each(asked: list[Asked]) -> list[tuple[Asked, str, bool]]:
    """Ask each in one protocol; all protocols have their turn, streamed and not."""
    forms = list(product(ROUTES, (False, True)))
    chosen = [(one, *forms[i % len(forms)]) for i, one in enumerate(asked)]
    return [one for one in chosen if spoken(one[0], one[1])]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """Markers are added tokens that are not special; thoughts can be switched off."""
    with scripted(published_model_dir(tmp_path_factory.mktemp("qwen3") / "m", "qwen3")) as daemon:
        yield daemon


def test_qwen3(qwen3: RunningDaemon) -> None:
    """Every way of asking in one of the protocols."""
    assert faults(qwen3, one_each(list(ways((True, False), thinks=True)))) == []


def test_qwen3_in_every_protocol(qwen3: RunningDaemon) -> None:
    """Every way of asking in all of them."""
    assert faults(qwen3, every(list(ways((True, False), thinks=True)))) == []


@pytest.mark.parametrize("family", ["gptoss", "gemma3", "llama2", "llama3_1", "deepseek_v3"])
def test_other_families(tmp_path: Path, family: str) -> None:
    """A smaller cut: harmony has channels, the others know no tools."""
    asked = list(ways((None,), thinks=family == "gptoss"))
    with scripted(published_model_dir(tmp_path / "m", family)) as daemon:
        assert faults(daemon, one_each(asked)) == []


def test_strict_tools_of_openai_agents(qwen3: RunningDaemon, tmp_path: Path) -> None:
    """They are strict unless told otherwise: a call is made, and its result used."""
    tasks = {"chat": CHAT, "tools": TOOLS_TASK, "structured": STRUCTURED}
    lines = recipe("openai-agents", "python", qwen3)
    result = run_program(qwen3, "openai_agents_client.py", tmp_path, tasks, recipe=lines)
    assert (result["tools"], result["responses"]) == (USED, USED)
    assert result["structured"] == WEATHER.model_dump()
