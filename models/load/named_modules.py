"""Modules of mlx-lm that a model's `tokenizer_config.json` names.

mlx-lm imports what these entries name, so that they may name its own modules only.
"""

from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

from ..errors import ModelLoadError
from ..estimate.folder import read_object

_PACKAGES = {
    "chat_template_type": "mlx_lm.chat_templates",
    "tool_parser_type": "mlx_lm.tool_parsers",
}


def require_known_modules(directory: Path) -> None:
    """Refuse a tokenizer that has something else imported.

    Raises:
        ModelLoadError: an entry names no module of mlx-lm's, or the file cannot be read.
    """
    path = directory / "tokenizer_config.json"
    try:
        settings = read_object(path)
    except FileNotFoundError:
        return
    for key, package in _PACKAGES.items():
        named, spec = settings.get(key), find_spec(package)
        known = [] if spec is None else iter_modules(spec.submodule_search_locations)
        if named and named not in (names := sorted(module.name for module in known)):
            raise ModelLoadError(f"{path} says {key} is {named!r}; mlx-lm has {', '.join(names)}")
