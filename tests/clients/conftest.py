"""A daemon whose answers a script chooses, for clients that need answers of a certain kind."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from ..daemon.running import RunningDaemon, running
from .outside import ROOT

CONTEXT = 65_536  # Claude Code's first request alone has about 20,000 tokens


def write_model(folder: Path, *, more_tokens: int = 0) -> Path:
    """Write a tiny random model with SmolLM2's tokenizer and chat template.

    Args:
        folder: is made.
        more_tokens: that its output layer has room for.
    """
    from umbel.models.load import embedded  # noqa: PLC0415  (it imports mlx.core)

    import mlx.core as mx  # noqa: PLC0415  # isort: skip  (after umbel.models)

    from ..tiny import tiny_model_dir  # noqa: PLC0415

    parts = embedded.load(mx.float16)
    tiny_model_dir(
        folder,
        vocab_size=parts.config["vocab_size"] + more_tokens,
        eos_token_id=next(iter(parts.tokenizer.eos_token_ids)),
        max_position_embeddings=CONTEXT,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    parts.tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def scripted(model: Path | str, tokenizer: Path | None = None) -> Iterator[RunningDaemon]:
    """Run a daemon on a socket and on TCP that answers as the plan in a prompt says.

    Args:
        model: its folder, or its name.
        tokenizer: the folder that has its `tokenizer.json`, if that is not the model's.
    """
    program = ("-m", "tests.clients.scripted", str((tokenizer or Path(model)) / "tokenizer.json"))
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="u") as folder,
    ):
        patch.chdir(ROOT)  # where the package `tests` is found
        with running(Path(folder), model, "--port", "0", program=program) as daemon:
            yield daemon


@pytest.fixture(scope="session")
def scripted_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A scripted daemon with SmolLM2's tokenizer and template."""
    with scripted(write_model(tmp_path_factory.mktemp("models") / "scripted")) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def thinking_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A scripted daemon whose template is like Qwen3's: it thinks, and knows tools."""
    from ..models.text.templates import MARKERS, THINKING  # noqa: PLC0415  (it imports mlx.core)

    folder = write_model(tmp_path_factory.mktemp("models") / "m", more_tokens=len(MARKERS))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(THINKING)
    with scripted(folder) as daemon:
        yield daemon
