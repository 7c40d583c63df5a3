"""Guides name messages, commands and settings that exist."""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer.main
from click import Group

from umbel.daemon.cli import app as cli
from umbel.daemon.config import SETTINGS, ModelSettings

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TROUBLE = ("troubleshooting.md", "troubleshooting-requests.md")
GUIDES = (
    "models.md",
    "moving.md",
    "eight-agents.md",
    "quickstart.md",
    "operate/running.md",
    *TROUBLE,
)

_ANYTHING = "…"


def page(name: str) -> str:
    """Read a page."""
    return (DOCS / name).read_text(encoding="utf-8")


def generator() -> ModuleType:
    """Import docs/generate_models.py."""
    path = DOCS / "generate_models.py"
    spec = importlib.util.spec_from_file_location("generate_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_of_models_are_generated() -> None:
    """docs/models.md has the figures that the daemon's arithmetic gives today."""
    assert generator().page() == page("models.md"), "run docs/generate_models.py --write"


# -- messages ------------------------------------------------------------------------------


@functools.cache
def texts() -> list[str]:
    """List the texts of the code; each value that is filled in is one character."""
    folders = ("daemon", "models", "cachestore", "scheduler", "src/umbel")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [
        text
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (text := _text(node))
    ]


def _text(node: ast.AST) -> str:
    """Return a text of the code; joined texts are one."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or _ANYTHING for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _ANYTHING
    return ""


def is_said(message: str) -> bool:
    """Return True if a text of the code contains a message."""
    pieces = [re.escape(piece) for piece in message.split(_ANYTHING)]
    pattern = re.compile(".*?".join(pieces), re.DOTALL)
    longest = max(message.split(_ANYTHING), key=len)
    return any(pattern.search(text) for text in texts() if longest in text)


def messages() -> Iterator[str]:
    """List the quotes of the two pages: sentences, and texts of the first columns."""
    for line in "\n".join(page(name) for name in TROUBLE).splitlines():
        if line.startswith("| ") and "---" not in line:
            cells = [cell.strip() for cell in line.strip("|").split("|")][:2]
            quoted = [found for cell in cells for found in re.findall(r"`([^`]+)`", cell)]
        else:
            quoted = re.findall(r"(?:says|log says) `([^`]+)`", line)
        yield from (each for each in quoted if " " in each and not each.startswith("umbel "))


@pytest.mark.parametrize("message", sorted(set(messages())))
def test_quoted_message_is_in_the_code(message: str) -> None:
    assert is_said(message)


def test_planted_message_is_found() -> None:
    """The pages quote many, and a message that is not in the code is found."""
    assert len(set(messages())) > 30
    assert not is_said("another daemon (pid …) serves already on …")


# -- commands and settings -----------------------------------------------------------------


@pytest.mark.parametrize("name", GUIDES)
def test_each_command_exists(name: str) -> None:
    """Each `umbel …` that a page tells people to run."""
    command = typer.main.get_command(cli)
    told = re.findall(r"umbel ((?:[a-z]+ )?[a-z]+)\b", _code(page(name)))
    assert told
    for words in told:
        found = command
        for word in words.split():
            if not isinstance(found, Group) or (
                word not in found.commands and found is not command
            ):
                break  # what follows is an argument
            assert word in found.commands, words
            found = found.commands[word]


def _code(text: str) -> str:
    """Return the contents of code spans and blocks, a line each."""
    return "\n".join(
        re.findall(r"```sh\n(.*?)```", text, re.DOTALL) + re.findall(r"`([^`\n]+)`", text)
    )


@pytest.mark.parametrize("name", GUIDES)
def test_each_setting_exists(name: str) -> None:
    """Each flag of `umbel serve` and each variable of umbel's that a page names."""
    variables = re.findall(r"\bUMBEL_[A-Z_]+", page(name))
    known = {setting.variable for setting in SETTINGS.values()} | {"UMBEL_CONFIG"}
    assert set(variables) <= known


def test_moving_names_settings_that_exist() -> None:
    """The right column of the tables about Ollama's variables, and mlx_lm.server's flags."""
    flags = {setting.flag for setting in SETTINGS.values()}
    keys = {setting.key for setting in SETTINGS.values()}
    rows = re.findall(r"^\| `(?:OLLAMA|--)[^|]*\| ([^|]*) \|$", page("moving.md"), re.MULTILINE)
    assert len(rows) > 10
    for cell in rows:
        for word in re.findall(r"`(--[a-z-]+)", cell):
            assert word in flags
        for word in re.findall(r"`([a-z]+_[a-z_]+)`", cell):
            assert word in keys | {"chat_template_kwargs"} | set(ModelSettings.__struct_fields__)
