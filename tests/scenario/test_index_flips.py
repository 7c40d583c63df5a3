"""A bit of the disk's index flips: a real model's answers are those of the tokens it was asked."""

import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from umbel.cachestore.disk.files import INDEX

from .. import zoo
from .memory_tools import Ask, ServerFixture, words, zoo_model

BUDGET = 1 << 26
ROUNDS = 4


class Flipped(NamedTuple):
    """A token of a row that became another one.

    Attributes:
        prompt: that leads through the row, with the token as it is in the row now.
        offset: of the token.
    """

    prompt: list[int]
    offset: int


def copied(filled: Path, number: int) -> Path:
    """Make a folder with the same files and index as one that was closed."""
    (state,) = filter(Path.is_dir, filled.iterdir())
    folder = filled.with_name(f"copy-{number}") / state.name
    folder.mkdir(parents=True)
    for path in state.iterdir():
        if path.suffix == ".safetensors":
            os.link(path, folder / path.name)  # they are not changed
        elif path.name == INDEX:
            shutil.copy(path, folder)
    return folder


def flip(folder: Path, prompts: list[list[int]], chosen: random.Random) -> Flipped:
    """Flip a bit of one row's own tokens, so that they are other tokens of the model's."""
    with closing(sqlite3.connect(folder / INDEX)) as database, database:
        rows = database.execute("SELECT id, start, tokens FROM records WHERE tokens != x''")
        of_prompts = [
            (row, start, np.frombuffer(own, np.int32).copy(), list(prompt))
            for row, start, own in rows
            for prompt in prompts
            if start < len(prompt) - 2 and prompt[start] == np.frombuffer(own, np.int32)[0]
        ]
        row, start, tokens, prompt = chosen.choice(of_prompts)
        offset = chosen.randrange(start, min(start + len(tokens), len(prompt) - 1))
        tokens[offset - start] ^= 1 << chosen.randrange(6)
        database.execute("UPDATE records SET tokens = ? WHERE id = ?", (tokens.tobytes(), row))
    prompt[offset] = int(tokens[offset - start])
    assert prompt[offset] < zoo.VOCAB_SIZE
    return Flipped(prompt, offset)


@pytest.mark.parametrize(
    "name",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "mamba2"))],
)
def test_a_flipped_token_of_a_row(name: str, tmp_path: Path) -> None:
    """Its state is served to no request: neither for the new token, nor for the old."""
    chosen, shared = random.Random(7), words(70, "shared")  # noqa: S311  (not a secret)
    prompts = [shared + words(60, f"agent {number}") for number in range(3)]
    plain, filled = ServerFixture(zoo_model(name), BUDGET), tmp_path / "filled"
    right = [told.tokens for told in plain.serve([Ask(prompt, 6) for prompt in prompts])]
    first = ServerFixture(zoo_model(name), BUDGET, disk=filled)
    assert [t.tokens for t in first.serve([Ask(prompt, 6) for prompt in prompts])] == right
    first.close()
    restored = 0
    for number in range(ROUNDS):
        folder = copied(filled, number)
        flipped = flip(folder, prompts, chosen)
        (expected,) = plain.serve([Ask(flipped.prompt, 6)])
        server = ServerFixture(zoo_model(name), BUDGET, disk=folder.parent)
        (told,) = server.serve([Ask(flipped.prompt, 6)])
        assert told.cached is not None
        assert told.cached <= flipped.offset
        assert told.tokens == expected.tokens
        again = server.serve([Ask(prompt, 6) for prompt in prompts])
        assert [each.tokens for each in again] == right
        restored += sum(each.cached or 0 for each in again)
        server.close()
    assert restored
