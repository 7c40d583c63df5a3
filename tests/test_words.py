"""Words and openings that make a text hard to read stand nowhere in code, tests and pages."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

WORDS = re.compile(
    r"\b(nobody|somebody|whoever|anew|but for|(?:is|are) told of|hears? of|those who|as above)\b",
    re.IGNORECASE,
)
OPENING = re.compile(r"(What|Whether|Have|Who|Whoever|Of these)\b")
COMMENT = re.compile(rf"\s*# {OPENING.pattern}")
CONTINUED = re.compile(r"\s*#.*[^.:?]$")  # a comment whose sentence goes on in the next line
# In pages, a sentence: at the start of a line, a table's cell or an item, or behind a full stop.
SENTENCE = re.compile(
    r"(?:^[ \t]*(?:[-*] |\d+\. |> )?|\| |[.:;!?] )\**"
    r"((?:What|Whether|Who|Whoever|Of these)\b(?![^.?!|\n]*\?))",
    re.MULTILINE,
)
# Texts that are meant as they stand: (path, a part of the line).
MEANT = {("tests/test_words.py", "")}
SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".service", ".socket", ".plist"}


def _files() -> Iterator[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        path = Path(name)
        if (path.suffix in SUFFIXES or path.parts[0] == ".ci") and (ROOT / path).is_file():
            yield name


def python_faults(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, words) of a module's docstrings, comments and other strings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] in {"COMMENT", "STRING", "FSTRING_MIDDLE"}:
            for found in WORDS.finditer(token.string):
                yield token.start[0] + token.string.count("\n", 0, found.start()), found[0]
    lines = source.splitlines()
    for number, line in enumerate(lines, 1):
        opening = COMMENT.match(line)
        if opening and (number == 1 or not CONTINUED.match(lines[number - 2])):
            yield number, opening[1]
    for node in ast.walk(ast.parse(source)):
        match node:  # a docstring, or the text below a constant
            case ast.Expr(value=ast.Constant(value=str(text))):
                if opening := OPENING.match(text):
                    yield node.lineno, opening[0]


def page_faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, words) of a text that is no Python."""
    for pattern in (WORDS, SENTENCE):
        for found in pattern.finditer(text):
            yield text.count("\n", 0, found.start(1)) + 1, found[1]


def test_no_text_has_banned_words() -> None:
    places = []
    for path in _files():
        source = (ROOT / path).read_text(encoding="utf-8")
        lines = source.splitlines()
        found = python_faults(source) if path.endswith(".py") else page_faults(source)
        places += [
            f"{path}:{line}: {words}"
            for line, words in found
            if not any(path == name and part in lines[line - 1] for name, part in MEANT)
        ]
    assert places == []


@pytest.mark.parametrize(
    "source",
    [
        '"""Whether it ends."""',
        'def f():\n    """What it is."""',
        'class A:\n    """Who asks."""',
        "x = 1  # made anew",
        "# What it is.\nx = 1",
        "# It ends.\n# Whether it ends.",
        'X = 1\n"""Who asks."""',
        'x = "nobody asked"',
        'x = f"{y}, but\u0020for one"',
        '"""Nobody\ncomes."""',
    ],
)
def test_planted_fault_of_code_is_found(source: str) -> None:
    assert len(list(python_faults(source))) == 1


@pytest.mark.parametrize(
    "source",
    ["nobody = 1", '"""Somebodyness."""', 'x = "Whether"', "# It says\n# Whether it ends."],
)
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
