"""Models that load, and fail when they are tried out: a sentence, and no harm to others."""

import importlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from umbel.models.backends import device_name

from ..tiny import tiny_model_dir
from .command import umbel
from .running import running
from .test_several_models import ask, configured, said, slots

NOT_WRITTEN = "the model has a cache for a layer that never writes to it"


def linear_dir(path: Path) -> Path:
    """Write a model one of whose attentions is replaced by a linear layer that keeps nothing."""
    tiny_model_dir(path)
    ffn = {"ffn_mult": 1.0}
    attentions = [{"no_op": True}, {"n_heads_in_group": 2}, {"replace_with_linear": True}]
    config: dict[str, Any] = {
        "model_type": "nemotron-nas",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 384,
        "max_position_embeddings": 256,
        "block_configs": [{"attention": each, "ffn": ffn} for each in (*attentions, attentions[1])],
    }
    module = importlib.import_module("mlx_lm.models.nemotron-nas")
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    named: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(path / "model.safetensors"), dict(named))
    (path / "config.json").write_text(json.dumps(config))
    return path


def activations_dir(path: Path) -> Path:
    """Write a model whose activations are quantised, which MLX cannot compute on a CPU."""
    model, config = load_model(tiny_model_dir(path))
    model, config = quantize_model(model, config, 16, 4, mode="nvfp4")
    save_model(path, model)
    save_config(config | {"quantize_activations": True}, path / "config.json")
    return path


@pytest.mark.skipif(device_name() != "cpu", reason="a GPU has what these models lack")
@pytest.mark.parametrize(
    ("write", "reason"),
    [(linear_dir, NOT_WRITTEN), (activations_dir, "fails when it is tried out, with RuntimeError")],
)
def test_a_model_that_fails_when_it_is_tried_out(
    short_path: Path, tiny_dir: Path, write: Callable[[Path], Path], reason: str
) -> None:
    """Requests for it are told why, and it is loaded once; a start of it ends with a sentence."""
    failing = write(short_path / "failing")
    with running(short_path, tiny_dir, env=configured(short_path, [tiny_dir, failing])) as daemon:
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(daemon.post, [ask("failing")] * 6))
        assert {reply.status for reply in replies} == {503}
        for reply in replies:
            assert "failing cannot be loaded: " in (told := reply.json()["error"]["message"])
            assert reason in told
        assert reason in slots(daemon)["failing"]["failure"]
        said(daemon, None)
        assert daemon.log().count(f"event=loading model={failing}") == 1
    done = umbel(
        *("serve", "--no-disk", "--model", str(failing), "--socket", str(short_path / "s")),
        folder=short_path,
    )
    assert done.returncode == 1
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
