"""How a model's makers would have tokens chosen: its `generation_config.json`."""

import math
from collections.abc import Mapping
from pathlib import Path

import structlog

from ..estimate.folder import generation_config

_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 1 << 31),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}

log = structlog.get_logger()


def sampling_defaults(folder: Path) -> dict[str, float]:
    """Read what holds where a request says nothing, by the names of `SamplingParams`.

    What is not a number in bounds is left out, and logged. So is all where the file asks for greedy
    answers (`do_sample` is false): its other values then mean nothing.

    Args:
        folder: of the model's files; without such a file there are none.
    """
    told = generation_config(folder)
    if told.get("do_sample") is False:
        return {}
    found = {}
    for name, (least, most) in _BOUNDS.items():
        value = told.get(name)
        if value is None:
            continue
        number = type(value) in (int, float) and math.isfinite(value)
        if not number or not least <= value <= most:
            log.warning("generation_config.json is not heeded", name=name, value=value)
        else:
            found[name] = int(value) if name == "top_k" else value
    return found
