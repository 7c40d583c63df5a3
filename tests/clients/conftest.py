"""A daemon whose answers a script chooses, for clients that need answers of a certain kind."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..daemon.running import RunningDaemon, running
from .outside import ROOT

CONTEXT = 65_536  # Claude Code's first request alone has about 20,000 tokens


@pytest.fixture(scope="session")
def scripted_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny random model with SmolLM2's tokenizer and chat template."""
    from umbel.models import embedded  # noqa: PLC0415  (it imports mlx.core)

    import mlx.core as mx  # noqa: PLC0415  # isort: skip  (after umbel.models)

    from ..tiny import tiny_model_dir  # noqa: PLC0415

    parts = embedded.load(mx.float16)
    folder = tiny_model_dir(
        tmp_path_factory.mktemp("models") / "scripted",
        vocab_size=parts.config["vocab_size"],
        eos_token_id=next(iter(parts.tokenizer.eos_token_ids)),
        max_position_embeddings=CONTEXT,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    parts.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def scripted_daemon(scripted_dir: Path) -> Iterator[RunningDaemon]:
    """A daemon on a socket and on TCP that answers as the plan in a prompt says."""
    program = ("-m", "tests.clients.scripted", str(scripted_dir / "tokenizer.json"))
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="u") as folder,
    ):
        patch.chdir(ROOT)  # where the package `tests` is found
        with running(Path(folder), scripted_dir, "--port", "0", program=program) as daemon:
            yield daemon
