"""Tokens that end an answer: every file of a model's folder may name some."""

from pathlib import Path
from typing import Any

from ..estimate.folder import generation_config, read_object


def token_ids(value: object) -> set[int]:
    """Read an entry `eos_token_id`: a number, or several."""
    listed = value if isinstance(value, list) else [value]
    return {each for each in listed if type(each) is int and each >= 0}


def ends_of(directory: Path, tokenizer: Any) -> set[int]:
    """Unite the ends that `config.json`, `generation_config.json` and the tokenizer name.

    Tools write defaults of other models into `config.json`, so that an ordinary token of the
    vocabulary is no end by that file's word while another file names ends.

    Args:
        directory: the model's.
        tokenizer: mlx-lm's, which knows its own ends.
    """
    config, told = read_object(directory / "config.json"), generation_config(directory)
    nested = config.get("text_config")
    in_config = token_ids(config.get("eos_token_id"))
    in_text_config = token_ids(nested.get("eos_token_id")) if isinstance(nested, dict) else set()
    certain = token_ids(told.get("eos_token_id")) or in_config or in_text_config
    added = set(tokenizer.backend_tokenizer.get_added_tokens_decoder())
    return set(tokenizer.eos_token_ids) | certain | (added & (in_config | in_text_config))
