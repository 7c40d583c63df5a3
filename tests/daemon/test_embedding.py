"""Tokens that the tokenizer has and the model has no embedding of."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from .running import RunningDaemon, running

IMAGE = "<image_soft_token>"
BEYOND = 384


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon whose tokenizer has one token more than its model, as Gemma 3 1B's."""
    from ..tiny import tiny_model_dir  # noqa: PLC0415  (it imports mlx.core)

    path = tiny_model_dir(tmp_path_factory.mktemp("models") / "tiny")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    assert tokenizer.token_to_id(IMAGE) == BEYOND
    tokenizer.save(str(path / "tokenizer.json"))
    with tempfile.TemporaryDirectory(prefix="u") as folder, running(Path(folder), path) as daemon:
        yield daemon


@pytest.mark.parametrize("prompt", [f"the agent {IMAGE} reads", [5, BEYOND, 6]])
def test_a_prompt_without_an_embedding_is_refused(
    daemon: RunningDaemon, prompt: str | list[int]
) -> None:
    """As a text and as ids, and where tokens are counted."""
    reply = daemon.post({"prompt": prompt, "max_tokens": 1}, "/v1/completions")
    assert reply.status == 400
    assert reply.json()["error"]["param"] == "prompt"
    if isinstance(prompt, str):
        assert daemon.post({"prompt": prompt}, "/tokenize").status == 400


def test_others_are_answered(daemon: RunningDaemon) -> None:
    """The last token that the model knows; and the name is text in a message."""
    last = {"prompt": [5, BEYOND - 1], "max_tokens": 1}
    assert daemon.post(last, "/v1/completions").status == 200
    talk = {"messages": [{"role": "user", "content": f"a {IMAGE} b"}], "max_tokens": 1}
    assert daemon.post(talk).status == 200
