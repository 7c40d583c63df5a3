"""Tokenizers, templates and sampling defaults are read as their makers published them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

import umbel.models  # noqa: F401  (before mlx.core, which mlx-lm imports)
from umbel.models.load.loader import load
from umbel.models.load.tokenizer import sampling_defaults
from umbel.models.text.codec import TextCodec
from umbel.models.text.conversation import Conversation, Message

from ..sentencepiece import sentencepiece_model_dir
from ..tiny import CHAT_TEMPLATE, tiny_model_dir

TEXT = "<s>[INST] the agent [/INST] Paris</s><s>[INST] 10 11 the 2 agents"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def change(file: Path, **entries: Any) -> None:
    settings = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def same_ids(path: Path, text: str = TEXT) -> bool:
    file = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = file.encode(text, add_special_tokens=False).ids
    return load(str(path)).text.encode(text, special_tokens=False) == ids


def test_a_prepended_blank_stays(tmp_path: Path) -> None:
    assert same_ids(sentencepiece_model_dir(tmp_path / "m"))


def test_the_files_own_splitting_is_used(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), tokenizer.pre_tokenizer]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    change(path / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    assert same_ids(path)


@pytest.mark.parametrize("kind", ["llama", "mimo"])
def test_config_json_is_not_the_tokenizers_business(tmp_path: Path, kind: str) -> None:
    path = tiny_model_dir(tmp_path / "m")
    change(path / "config.json", rope_scaling=LLAMA3, tokenizer_class="NoSuchTokenizer")
    if kind != "llama":
        from umbel.models.load.tokenizer import open_tokenizer  # noqa: PLC0415

        change(path / "config.json", model_type="nobody_knows", max_position_embeddings=None)
        codec = TextCodec(open_tokenizer(path))
        assert codec.encode("the agent") == load(str(tiny_model_dir(tmp_path / "n"))).text.encode(
            "the agent"
        )
    else:
        assert same_ids(path)


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_templates_of_vision_models_are_found(tmp_path: Path, name: str) -> None:
    path = tiny_model_dir(tmp_path / "m")
    ask = Conversation(messages=[Message(role="user", content="the agent")])
    expected = load(str(path)).text.encode_conversation(ask)
    change(path / "tokenizer_config.json", chat_template=None)
    assert not load(str(path)).text.has_chat_template
    (path / name).write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    assert load(str(path)).text.encode_conversation(ask) == expected
    change(path / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    assert load(str(path)).text.template.render(ask) == "the agent"


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        ),
        (
            {"do_sample": True, "min_p": 0.05, "repetition_penalty": 1.05},
            {"min_p": 0.05, "repetition_penalty": 1.05},
        ),
        ({"do_sample": False, "temperature": 0.7}, {}),
        ({"temperature": None, "top_p": 0.9, "eos_token_id": [1, 2]}, {"top_p": 0.9}),
        ({"temperature": 3, "top_p": "0.9", "top_k": -1, "min_p": True}, {}),
        ([1, 2], {}),
    ],
)
def test_sampling_defaults_are_read(tmp_path: Path, told: Any, found: dict[str, float]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    assert sampling_defaults(tmp_path) == found


@pytest.mark.parametrize("text", [None, "", "{", "\xff"])
def test_unusable_generation_config_has_no_sampling_defaults(
    tmp_path: Path, text: str | None
) -> None:
    file = tmp_path / "generation_config.json"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    assert sampling_defaults(tmp_path) == {}
    assert sampling_defaults(file) == {}
