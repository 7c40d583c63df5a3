"""A model's `config.json`, as mlx-lm reads it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeGuard, cast

from ..errors import ModelLoadError, ModelNotFoundError
from .folder import read_object

_CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("model_max_length", "max_context_length", "max_sequence_length"),
)
_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
_COUNTS = (
    *(*_CONTEXT_KEYS, *_HEADS, "hidden_size", "num_hidden_layers", "num_key_value_heads"),
    *("head_dim", "vocab_size"),
)
_MOST_LAYERS = 10_000
_UNBOUNDED_CONTEXT = 1_048_576  # of a recurrent model without positions: requests need a limit
_LONGEST_CONTEXT = (1 << 31) - 1  # tokens that MLX counts; some tools write 1e30 for no limit
_WITHOUT_POSITIONS = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv7"})
# Without llama3, whose factor times its original length is no supported length.
_LENGTHENING = frozenset({"yarn", "deepseek_yarn", "telechat3-yarn", "linear", "longrope"})


class ModelConfig:
    """Entries that describe the text model, nested or not.

    Attributes:
        type: of the architecture, without the suffix of a text part.
        context_length: upper bound of prompt and answer, in tokens.
    """

    def __init__(self, entries: Mapping[str, Any]) -> None:
        parts = list(_parts(entries))
        merged = {key: value for part in parts for key, value in part.items() if value is not None}
        self.type = str(merged.get("model_type", "")).removesuffix("_text")
        if self.type not in _WITHOUT_POSITIONS and not any(key in merged for key in _HEADS):
            merged = _arguments(entries) | merged
        self._entries = merged
        self.context_length = _context_length(entries, parts, self.type)

    @classmethod
    def read(cls, directory: Path) -> "ModelConfig":
        """Read it from a model's folder.

        Raises:
            ModelNotFoundError: there is none.
            ModelLoadError: it is invalid.
        """
        path = directory / "config.json"
        try:
            entries = read_object(path)
        except FileNotFoundError as error:
            raise ModelNotFoundError(
                f"{directory} holds no mlx-lm model: it holds no config.json"
            ) from error
        for part in _parts(entries):
            if wrong := _wrong_number(part):
                raise ModelLoadError(f"{path} says {wrong}")
        return cls(entries)

    @property
    def layer_count(self) -> int:
        """Layers that each token passes."""
        return self.number("num_hidden_layers", "n_layers", "n_layer")

    def number(self, *keys: str, default: int = 0) -> int:
        """Return the first of these entries that is there."""
        return next((int(self._entries[key]) for key in keys if key in self._entries), default)

    def words(self, key: str) -> Sequence[Any]:
        """Return a list, or the letters of a text; empty if there is none."""
        value = self._entries.get(key, ())
        return value if isinstance(value, list | tuple | str) else ()

    def part(self, key: str) -> Mapping[str, Any]:
        """Return an object; empty if there is none."""
        value = self._entries.get(key, {})
        return value if isinstance(value, dict) else {}

    def has(self, key: str) -> bool:
        """True if an entry is there, and true."""
        return bool(self._entries.get(key))


def _parts(entries: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the entries, then those of a nested text model."""
    yield entries
    if isinstance(nested := entries.get("text_config"), dict):
        yield nested


def _wrong_number(part: Mapping[str, Any]) -> str | None:
    """Describe an impossible number; None if all are possible."""
    for key in _COUNTS:
        value = part.get(key)
        if value is not None and not (_is_number(value) and value >= 1 and value == int(value)):
            return f"{key} is {value!r}, which must be a whole number of 1 or more"
    if (part.get("num_hidden_layers") or 0) > _MOST_LAYERS:
        return f"num_hidden_layers is above {_MOST_LAYERS}"
    scaling = part.get("rope_scaling")
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    for key, value in (("rope_theta", part.get("rope_theta")), ("rope_scaling.factor", factor)):
        each = value if isinstance(value, list) else [value]  # Step 3.5 has one for each layer
        if value is not None and not all(_is_number(one) and one > 0 for one in each):
            return f"{key} is {value!r}, which must be a number above 0"
    return None


def _is_number(value: object) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(cast("float", value))


def _context_length(
    entries: Mapping[str, Any], parts: Sequence[Mapping[str, Any]], architecture: str
) -> int:
    stated = next((found for part in parts if (found := _stated(part))), None)
    scalable = max(_scaled(part) for part in parts)
    if stated is None and architecture in _WITHOUT_POSITIONS:
        return _UNBOUNDED_CONTEXT
    if stated is None or scalable > stated:
        taken = _arguments(entries)  # a scaling counts only if the architecture uses it
        stated = max(stated or _stated(taken) or _UNBOUNDED_CONTEXT, _scaled(taken))
    return min(stated, _LONGEST_CONTEXT)


def _stated(part: Mapping[str, Any]) -> int | None:
    return next((int(part[key]) for key in _CONTEXT_KEYS if part.get(key)), None)


def _scaled(part: Mapping[str, Any]) -> int:
    """Return the length that a scaling of rotary positions gives; 0 without one."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = part.get(key)
        if not isinstance(scaling, dict):
            continue
        kind = scaling.get("type") or scaling.get("rope_type")
        factor = scaling.get("factor")
        name = "original_max_position_embeddings"
        original = scaling.get(name) or part.get(name)
        if kind in _LENGTHENING and _is_number(factor) and _is_number(original):
            return int(factor * original)
    return 0


def _arguments(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Read a configuration by its architecture's classes, which add defaults.

    Imports mlx-lm, which takes a second or two. Empty if the architecture is unknown or refuses it.
    """
    from ..load import open_files  # noqa: F401, PLC0415  # isort: skip  (the first import of mlx_lm)
    from mlx_lm.utils import _get_classes  # noqa: PLC0415

    found: dict[str, Any] = {}
    part: Any = deepcopy(dict(entries))
    while isinstance(part, dict):
        try:
            taken = vars(_get_classes(part)[1].from_dict(part))
        except Exception:  # noqa: BLE001  (whatever a class raises: the load says so)
            break
        found |= {key: value for key, value in taken.items() if value is not None}
        part = taken.get("text_config")
    return found
