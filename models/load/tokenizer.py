"""A model's tokenizer, ends of answers and sampling defaults, as its makers published them."""

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import structlog
from mlx_lm.utils import load_tokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from ..errors import ModelLoadError
from ..estimate.folder import generation_config, read_object

_PACKAGES = {
    "chat_template_type": "mlx_lm.chat_templates", "tool_parser_type": "mlx_lm.tool_parsers"
}  # fmt: skip
# transformers' class that uses tokenizer.json as it is. Others build their own tokenizer from its
# vocabulary, and the choice of a class reads, and may refuse, config.json.
_AS_PUBLISHED = next(
    kind for kind, name in TOKENIZER_MAPPING_NAMES.items() if name == "TokenizersBackend"
)

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}

log = structlog.get_logger()


def open_tokenizer(directory: Path, ends: Collection[int] | None = None) -> Any:
    """Load a directory's tokenizer and chat template as mlx-lm's `TokenizerWrapper`.

    `ends` are tokens that end an answer, besides the tokenizer's own. Raises any error for files
    that cannot be read.
    """
    # Without it, transformers would ask on the terminal.
    settings: dict[str, Any] = {"trust_remote_code": False}
    if (directory / "tokenizer.json").is_file():
        settings["tokenizer_type"] = _AS_PUBLISHED
    if template := _processor_template(directory):
        settings["chat_template"] = template
    return load_tokenizer(directory, settings, eos_token_ids=ends)


def _processor_template(directory: Path) -> str | None:
    """Find a template that makers of vision models put beside the tokenizer's settings."""
    if (directory / "chat_template.jinja").is_file():
        return None
    files = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
    templates = [_settings(directory / name).get("chat_template") for name in files]
    if templates[0]:
        return None
    return next((template for template in templates if isinstance(template, str)), None)


def _settings(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except FileNotFoundError:
        return {}


def require_known_modules(directory: Path) -> None:
    """Raise ModelLoadError for a tokenizer that would import other modules than mlx-lm's."""
    path = directory / "tokenizer_config.json"
    settings = _settings(path)
    for key, package in _PACKAGES.items():
        named, spec = settings.get(key), find_spec(package)
        known = [] if spec is None else iter_modules(spec.submodule_search_locations)
        if named and named not in (names := sorted(module.name for module in known)):
            raise ModelLoadError(f"{path} says {key} is {named!r}; mlx-lm has {', '.join(names)}")


def token_ids(value: object) -> set[int]:
    """Read an entry `eos_token_id`: a number, or several."""
    listed = value if isinstance(value, list) else [value]
    return {each for each in listed if type(each) is int and each >= 0}


def ends_of(directory: Path, tokenizer: Any) -> set[int]:
    """Unite the ends that `config.json`, `generation_config.json` and the tokenizer name.

    Tools write other models' defaults into `config.json`. So an ordinary token there is no end if
    another file names ends.
    """
    config, told = read_object(directory / "config.json"), generation_config(directory)
    nested = config.get("text_config")
    in_config = token_ids(config.get("eos_token_id"))
    in_text_config = token_ids(nested.get("eos_token_id")) if isinstance(nested, dict) else set()
    certain = token_ids(told.get("eos_token_id")) or in_config or in_text_config
    added = set(tokenizer.backend_tokenizer.get_added_tokens_decoder())
    return set(tokenizer.eos_token_ids) | certain | (added & (in_config | in_text_config))


def sampling_defaults(folder: Path) -> dict[str, float]:
    """Read the defaults of `SamplingParams` from `generation_config.json`, by name.

    Values that are no numbers in bounds are ignored, and logged. All are ignored if the file asks
    for greedy answers (`do_sample` is false), for which they have no meaning.
    """
    told = generation_config(folder)
    if told.get("do_sample") is False:
        return {}
    found = {}
    for name, (least, most) in _BOUNDS.items():
        value = told.get(name)
        if value is None:
            continue
        if type(value) not in (int, float) or not least <= value <= most:  # false for nan
            log.warning("ignored value in generation_config.json", name=name, value=value)
        else:
            found[name] = int(value) if name == "top_k" else value
    return found
