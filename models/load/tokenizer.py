"""A model's tokenizer as its makers published it."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

# transformers' class that serves tokenizer.json as it is. Others build a tokenizer of their own
# from its vocabulary, and the choice of a class reads, and may refuse, config.json.
_AS_PUBLISHED = next(
    kind for kind, name in TOKENIZER_MAPPING_NAMES.items() if name == "TokenizersBackend"
)


def open_tokenizer(directory: Path, ends: Collection[int] | None = None) -> Any:
    """Load the tokenizer of a directory with its chat template, as mlx-lm's `TokenizerWrapper`.

    Args:
        directory: of the model's files.
        ends: tokens that end an answer, besides the tokenizer's own.

    Raises:
        Exception: of any kind, for files that cannot be read.
    """
    # Said aloud, because transformers would ask on the terminal otherwise.
    settings: dict[str, Any] = {"trust_remote_code": False}
    if (directory / "tokenizer.json").is_file():
        settings["tokenizer_type"] = _AS_PUBLISHED
    if template := _processor_template(directory):
        settings["chat_template"] = template
    return load_tokenizer(directory, settings, eos_token_ids=ends)


def _processor_template(directory: Path) -> str | None:
    """The template that makers of vision models put beside the tokenizer's settings."""
    if (directory / "chat_template.jinja").is_file():
        return None
    if _entry(directory / "tokenizer_config.json"):
        return None
    files = ("chat_template.json", "processor_config.json")
    templates = (_entry(directory / name) for name in files)
    return next((template for template in templates if isinstance(template, str)), None)


def _entry(file: Path) -> Any:
    settings = json.loads(file.read_text()) if file.is_file() else {}
    return settings.get("chat_template") if isinstance(settings, dict) else None
