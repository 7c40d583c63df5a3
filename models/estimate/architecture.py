"""What mlx-lm's classes take of a configuration, and put in where it says nothing."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any


def arguments(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Read a configuration as the classes of its architecture do, nested text models included.

    mlx-lm is imported here, which takes a second or two.

    Args:
        entries: of `config.json`.

    Returns:
        The arguments that are not None; none where the architecture is unknown, or refuses these
        entries.
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
