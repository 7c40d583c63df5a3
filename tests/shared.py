"""Tiny models that the tests of a process share, and what loading them measures.

A runner measures its model first: if it runs in batches, and what its steps take. That
is most of what a short test computes, and says the same of the same model each time.
"""

import copy
import functools
import os
import pickle
import secrets
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import pytest

import umbel.models  # noqa: F401  (before mlx.core)
from umbel.models import runner
from umbel.models.backends.base import METAL, Backend

from . import zoo

# To compile on the CPU is to start a C++ compiler; test_cascade.py compares what is compiled. What
# emulates a kernel takes milliseconds a call, and what is padded for cuDNN is scores here.
AS_GPU = replace(
    METAL,
    limits=replace(METAL.limits, host_reads=False),
    compiles=False,
    length_multiple=8,
    launches_layers=True,
)
"""How a GPU is run, on the CPU."""

B = TypeVar("B", bound=Backend)


def limited(backend: B, **limits: Any) -> B:
    """The same backend with other limits."""
    return replace(backend, limits=replace(backend.limits, **limits))


TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
"""Stand-in for a shape of `benchmarks/shapes.py` where a benchmark is only to run."""

KEPT = "MEASURED_OF_TINY_MODELS"
"""Environment variable: the folder that processes share what they measure in, if they do."""

_measured: dict[tuple[Any, ...], Any] = {}
kept_models: list[Any] = []  # that were measured: no other may get the id of one
_labels: dict[int, str] = {}  # by the ids of models that stay


@functools.cache
def shared_model(name: str, **overrides: Any) -> Any:
    """Make a model as `zoo.make` does, once. Its arrays belong to the main thread."""
    return labelled(zoo.make(name, **overrides), name, **overrides)


def labelled(model: Any, name: str, dtype: str = "float32", **overrides: Any) -> Any:
    """Say what a model is in every process: what one of them measures of it, all know.

    Args:
        model: made as the other arguments say, and never changed.
        name: in the zoo.
        dtype: of its weights.
        overrides: as for `zoo.make`.
    """
    _labels[id(model)] = repr((name, dtype, sorted(overrides.items())))
    kept_models.append(model)
    return model


@contextmanager
def measured_once(model: Any, *, called: Container[str] = ()) -> Iterator[None]:
    """Let a `ModelRunner` made in the block measure the model only if no other one has.

    What was measured is the maker's own: it goes on learning.

    Args:
        model: of the runner.
        called: functions that are called all the same.
    """
    names = ("probe", "measure")
    with pytest.MonkeyPatch.context() as patch:
        for name in (name for name in names if name not in called):
            patch.setattr(runner, name, _once(getattr(runner, name), model))
        yield


def _once(real: Callable[..., Any], model: Any) -> Callable[..., Any]:
    def known(*args: Any, **options: Any) -> Any:
        chosen = [arg for arg in args if isinstance(arg, int) or is_dataclass(arg)]
        label = _labels.get(id(model))
        key = label or id(model), real.__name__, *chosen, *sorted(options.items())
        if key not in _measured:
            # Measurements in a folder of their own are for one test.
            shared = label is not None and options.get("folder") is None
            path = _path_of(key) if shared else None
            _measured[key] = _kept(path, lambda: real(*args, **options))
            kept_models.append(model)
        return copy.deepcopy(_measured[key])

    return known


def _path_of(key: tuple[Any, ...]) -> Path | None:
    folder = os.environ.get(KEPT)
    return None if folder is None else Path(folder, sha256(repr(key).encode()).hexdigest())


def _kept(path: Path | None, measure: Callable[[], Any]) -> Any:
    """Read what any process has measured; measure it where none has."""
    if path is None:
        return measure()
    if path.exists():
        return pickle.loads(path.read_bytes())  # noqa: S301  (we wrote it)
    found = measure()
    temporary = path.with_name(secrets.token_hex(8))
    temporary.write_bytes(pickle.dumps(found))
    temporary.replace(path)
    return found
