"""A model's `config.json`, as mlx-lm reads it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ModelNotFoundError
from .folder import read_object

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# What a recurrent model without positions is held to: it has no limit of its own, but
# a request must have one.
_UNBOUNDED_CONTEXT = 1_048_576


class ModelConfig:
    """The entries that describe the text model, whether or not they are nested.

    Attributes:
        type: of the architecture, without the suffix that tells the text part.
        context_length: see the function of that name.

    Args:
        entries: of `config.json`.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        nested = entries.get("text_config") or {}
        merged = {**entries, **nested}
        self._entries = {key: value for key, value in merged.items() if value is not None}
        self.type = str(self._entries.get("model_type", "")).removesuffix("_text")
        self.context_length = context_length(entries)

    @classmethod
    def read(cls, directory: Path) -> "ModelConfig":
        """Read it from a model's folder.

        Raises:
            ModelNotFoundError: there is none.
            ModelLoadError: it is no configuration.
        """
        try:
            return cls(read_object(directory / "config.json"))
        except FileNotFoundError as error:
            raise ModelNotFoundError(
                f"{directory} holds no mlx-lm model: it holds no config.json"
            ) from error

    @property
    def layer_count(self) -> int:
        """Layers that see each token."""
        return self.number("num_hidden_layers", "n_layers", "n_layer")

    def number(self, *keys: str, default: int = 0) -> int:
        """Return the first of these entries that is there."""
        return next((int(self._entries[key]) for key in keys if key in self._entries), default)

    def words(self, key: str) -> Sequence[Any]:
        """Return a list, or the letters of a text; empty where there is none."""
        value = self._entries.get(key, ())
        return value if isinstance(value, list | tuple | str) else ()

    def part(self, key: str) -> Mapping[str, Any]:
        """Return an object; empty where there is none."""
        value = self._entries.get(key, {})
        return value if isinstance(value, dict) else {}

    def has(self, key: str) -> bool:
        """Whether an entry is there, and true."""
        return bool(self._entries.get(key))


def context_length(config: Mapping[str, Any]) -> int:
    """Return the most tokens of prompt and answer that a model was made for."""
    for part in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if part.get(key):
                return int(part[key])
    return _UNBOUNDED_CONTEXT
