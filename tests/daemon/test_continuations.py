"""Text completions go on from their prompt's last character."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from .running import RunningDaemon, running


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with blanks before its words."""
    from ..sentencepiece import sentencepiece_model_dir  # noqa: PLC0415  (it imports mlx.core)

    return sentencepiece_model_dir(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def daemon(path: Path) -> Iterator[RunningDaemon]:
    """A daemon with that model."""
    with tempfile.TemporaryDirectory(prefix="u") as folder, running(Path(folder), path) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def paris(path: Path) -> dict[str, Any]:
    """A body whose answer is one word, again and again."""
    word = Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id("▁Paris")
    return {"max_tokens": 3, "logit_bias": {str(word): 100}, "temperature": 0}


def test_the_first_blank_is_there(daemon: RunningDaemon, paris: dict[str, Any]) -> None:
    """In the text and in its tokens, for a text and for ids; and stop sequences find it."""
    ids = daemon.post({"prompt": "the Paris"}, "/tokenize").json()["tokens"]
    for prompt in ("the Paris", ids):
        body = paris | {"prompt": prompt, "logprobs": 0}
        (choice,) = daemon.post(body, "/v1/completions").json()["choices"]
        assert choice["text"] == " Paris Paris Paris"
        assert choice["logprobs"]["tokens"] == [" Paris"] * 3
    stopped = daemon.post(paris | {"prompt": "the", "stop": [" Paris"]}, "/v1/completions")
    assert stopped.json()["choices"][0]["text"] == ""


def test_an_answer_begins_without_a_blank(daemon: RunningDaemon, paris: dict[str, Any]) -> None:
    """In a conversation, and where the prompt has no text."""
    talk = paris | {"messages": [{"role": "user", "content": "the"}]}
    (choice,) = daemon.post(talk).json()["choices"]
    assert choice["message"]["content"] == "Paris Paris Paris"
    begun = daemon.post(paris | {"prompt": [1]}, "/v1/completions").json()["choices"][0]
    assert begun["text"] == "Paris Paris Paris"
