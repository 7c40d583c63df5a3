"""Tokenizers and templates are read as their makers published them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

import umbel.models  # noqa: F401  (before mlx.core, which mlx-lm imports)
from umbel.models.load.loader import load
from umbel.models.text.codec import TextCodec
from umbel.models.text.conversation import Conversation, Message

from ..sentencepiece import sentencepiece_model_dir
from ..tiny import CHAT_TEMPLATE, tiny_model_dir

TEXT = "<s>[INST] the agent [/INST] Paris</s><s>[INST] 10 11 the 2 agents"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def change(file: Path, **entries: Any) -> None:
    """Change entries of a JSON file; None removes one."""
    settings = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def same_ids(path: Path, text: str = TEXT) -> bool:
    """Whether umbel reads a text as tokenizer.json says."""
    file = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = file.encode(text, add_special_tokens=False).ids
    return load(str(path)).text.encode(text, special_tokens=False) == ids


def test_a_prepended_blank_stays(tmp_path: Path) -> None:
    """Behind each special token, as Llama 2's file has it and transformers' class has not."""
    assert same_ids(sentencepiece_model_dir(tmp_path / "m"))


def test_the_files_own_splitting_is_used(tmp_path: Path) -> None:
    """Digits apart, although the class that is named splits in GPT-2's way."""
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
    """A type that transformers does not know, with a scaling that it would want more of."""
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
    """Beside the tokenizer's settings, where these have none."""
    path = tiny_model_dir(tmp_path / "m")
    ask = Conversation(messages=[Message(role="user", content="the agent")])
    expected = load(str(path)).text.encode_conversation(ask)
    change(path / "tokenizer_config.json", chat_template=None)
    assert not load(str(path)).text.has_chat_template
    (path / name).write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    assert load(str(path)).text.encode_conversation(ask) == expected
    change(path / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    assert load(str(path)).text.template.render(ask) == "the agent"
