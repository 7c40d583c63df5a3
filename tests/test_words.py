"""Counts words and openings that make a text hard to read, and lets no folder have more of them.

To list a folder's places, set its number in `ALLOWED` to 0 and run the test.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The most places that a folder may have. Lower a number when you mend places; never raise one.
ALLOWED = {
    "daemon": 39,
    "models": 11,
    "scheduler": 0,
    "src": 0,
    "tests/daemon": 130,
    "tests/models": 12,
    "tests/scheduler": 0,
}

WORDS = re.compile(
    r"\b(nobody|somebody|whoever|anew|but for|(?:is|are) told of|hears? of|those who|as above)\b",
    re.IGNORECASE,
)
DOCSTRING = re.compile(r"(What|Whether|Have|Who|Whoever|Of these)\b")
# In pages, a sentence: at the start of a line, a table's cell or an item, or behind a full stop.
SENTENCE = re.compile(
    r"(?:^[ \t]*(?:[-*] |\d+\. |> )?|\| |[.:;!?] )\**"
    r"((?:What|Whether|Who|Whoever|Of these)\b(?![^.?!|\n]*\?))",
    re.MULTILINE,
)
# Texts that are meant as they stand: (path, a part of the line).
MEANT = {("tests/test_words.py", "")}
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".service", ".socket", ".plist"}


@cache
def _files() -> tuple[str, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    paths = (Path(name) for name in listed.split("\0") if name)
    return tuple(
        str(p)
        for p in paths
        if (p.suffix in SUFFIXES or p.parts[0] == ".ci") and (ROOT / p).is_file()
    )


def _folder(path: str) -> str:
    """Return the entry of `ALLOWED` that a file counts for."""
    first, *rest = path.split("/")
    if not rest:
        return "docs" if path.endswith(".md") else "."
    return f"tests/{rest[0]}" if first == "tests" and len(rest) > 1 else first


def python_faults(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, words) of a module's docstrings, comments and other strings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] in {"COMMENT", "STRING", "FSTRING_MIDDLE"}:
            for found in WORDS.finditer(token.string):
                yield token.start[0] + token.string.count("\n", 0, found.start()), found[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            opening = DOCSTRING.match(ast.get_docstring(node) or "")
            if opening:
                yield node.body[0].lineno, opening[0]


def page_faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, words) of a text that is no Python."""
    for pattern in (WORDS, SENTENCE):
        for found in pattern.finditer(text):
            yield text.count("\n", 0, found.start(1)) + 1, found[1]


@cache
def _places() -> dict[str, list[str]]:
    """Find the places of each folder: `path:line: words`."""
    places: dict[str, list[str]] = {}
    for path in _files():
        source = (ROOT / path).read_text(encoding="utf-8")
        lines = source.splitlines()
        found = python_faults(source) if path.endswith(".py") else page_faults(source)
        places.setdefault(_folder(path), []).extend(
            f"{path}:{line}: {words}"
            for line, words in found
            if not any(path == name and part in lines[line - 1] for name, part in MEANT)
        )
    return places


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_folder_has_no_more_banned_words(folder: str) -> None:
    places = _places()[folder]
    allowed = ALLOWED[folder]
    listed = "\n".join(sorted(places))
    assert len(places) <= allowed, f"{len(places)} places, {allowed} allowed:\n{listed}"


def test_folders_with_banned_words_are_listed() -> None:
    assert {folder for folder, places in _places().items() if places} <= ALLOWED.keys()


@pytest.mark.parametrize(
    "source",
    [
        '"""Whether it ends."""',
        'def f():\n    """What it is."""',
        'class A:\n    """Who asks."""',
        "x = 1  # made anew",
        'x = "nobody asked"',
        'x = f"{y}, but\u0020for one"',
        '"""Nobody\ncomes."""',
    ],
)
def test_planted_fault_of_code_is_found(source: str) -> None:
    assert len(list(python_faults(source))) == 1


@pytest.mark.parametrize("source", ["nobody = 1", '"""Somebodyness."""', 'x = "Whether"'])
def test_other_code_is_no_fault(source: str) -> None:
    assert list(python_faults(source)) == []


@pytest.mark.parametrize(
    "text", ["Whether it ends.", "a. Who asks waits.", "| What is kept | x |", "made anew"]
)
def test_planted_fault_of_a_page_is_found(text: str) -> None:
    assert len(list(page_faults(text))) == 1


@pytest.mark.parametrize("text", ["## What is cached?", "Ask who it is.", "Say whether it is."])
def test_other_text_is_no_fault(text: str) -> None:
    assert list(page_faults(text)) == []
