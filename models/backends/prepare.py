"""Prepares a loaded model for a backend: umbel's operations in the place of mlx-lm's.

A layer of mlx-lm calls functions of its Python module, such as `scaled_dot_product_attention`. A
layer of a prepared model has a subclass as its class, whose methods are mlx-lm's and see umbel's
functions under these names. mlx-lm's Python modules and classes stay as they are, so several
models of one family can be prepared in different ways in one process.

The layer that computes logits does so for some tokens only, if asked: mlx-lm's compute those of
every token, a product with the whole vocabulary for each, and a prompt needs the last one's.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models import activations, base, gated_delta
from mlx_lm.models.cache import ChunkedKVCache

from ..attention.binding import Attention
from ..attention.rows import CountsByRow
from .base import Backend

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": base.scaled_dot_product_attention,
    "swiglu": activations.swiglu,
    "gated_delta_update": gated_delta.gated_delta_update,
}
"""mlx-lm's functions that are replaced, by their name."""

_HEADS = ("lm_head", "output", "embed_out")
"""mlx-lm's names for the layer that computes logits, where that is not the embedding."""

_ORIGINAL = "_mlx_lm_class"
"""Attribute of a layer with another class than mlx-lm's: the class that it had."""

_BACKEND, _OUTPUTS = "_prepared_for", "_output_rows"
"""Attributes of a model: the backend that it is prepared for, and the choice of its logits."""


class OutputRows:
    """The tokens of a model's call that have logits: all, except in a block of `only`.

    Attributes:
        known: the layer that computes logits is known; without it all tokens always have some.
    """

    def __init__(self) -> None:
        self.known = True
        self._rows: mx.array | None = None

    def of(self, hidden: mx.array) -> mx.array:
        """Choose tokens of `[rows, tokens, size]`: `[chosen, 1, size]`, or all as they are."""
        if self._rows is None:
            return hidden
        return hidden.reshape(-1, 1, hidden.shape[-1])[self._rows]

    @contextmanager
    def only(self, rows: Sequence[int]) -> Iterator[None]:
        """Compute the logits of these tokens only, if `known`, until the block ends.

        Args:
            rows: their numbers, counted through all rows of a call.
        """
        self._rows = mx.array(list(rows)) if self.known else None
        try:
            yield
        finally:
            self._rows = None


def prepare(model: Any, backend: Backend) -> OutputRows:
    """Make a model's layers call the operations of a backend. Other models stay as they are.

    The last call counts. A model that is prepared for this backend stays as it is.

    Args:
        model: mlx-lm's.
        backend: with the operations.

    Returns:
        The choice of tokens that have logits; the same object for each call with this model.
    """
    if _OUTPUTS not in vars(model):
        _own_layers(model)
        vars(model)[_OUTPUTS] = OutputRows()
    outputs: OutputRows = vars(model)[_OUTPUTS]
    if vars(model).get(_BACKEND) == backend:
        return outputs
    restore(model)
    classes = _Classes(backend)
    for name, layer in _layers(model):
        original, head = type(layer), _head_class(name, layer)
        if head is not None:
            vars(layer)["outputs"] = outputs
        kind = head or classes.of(layer)
        if kind is not original:
            vars(layer)[_ORIGINAL] = original
            layer.__class__ = kind
    vars(model)[_BACKEND] = backend
    return outputs


def restore(model: Any) -> None:
    """Give a model's layers mlx-lm's and MLX's classes back."""
    for _, layer in _layers(model):
        layer.__class__ = vars(layer).pop(_ORIGINAL, type(layer))
    vars(model).pop(_BACKEND, None)


def _own_layers(model: Any) -> None:
    """Copy layers without weights: a layer that is a default argument is part of several models."""
    for layer in model.modules():
        for name, part in layer.children().items():
            if isinstance(part, Module) and not part:
                layer[name] = copy.copy(part)


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    """All layers, each once, with the last part of its name."""
    seen = {id(layer): (name.rpartition(".")[2], layer) for name, layer in model.named_modules()}
    return iter(seen.values())


class _Head:
    """A layer with the logits of chosen tokens: `[rows, tokens, V]` or `[chosen, 1, V]`."""

    outputs: OutputRows

    def __call__(self, hidden: mx.array) -> mx.array:
        logits: mx.array = super().__call__(self.outputs.of(hidden))  # type: ignore[misc]
        return logits


class _Tied:
    """An embedding with the same."""

    outputs: OutputRows

    def as_linear(self, hidden: mx.array) -> mx.array:
        logits: mx.array = super().as_linear(self.outputs.of(hidden))  # type: ignore[misc]
        return logits


def _head_class(name: str, layer: Any) -> type | None:
    kind = type(layer)
    if kind in {Embedding, QuantizedEmbedding}:
        return type(kind.__name__, (_Tied, kind), {})
    if kind in {Linear, QuantizedLinear} and name in _HEADS:
        return type(kind.__name__, (_Head, kind), {})
    return None


class _Classes:
    """The classes of one model's layers, which call a backend's operations."""

    def __init__(self, backend: Backend) -> None:
        self._convolution = backend.convolution
        self._functions: Mapping[str, Callable[..., Any]] = {
            "scaled_dot_product_attention": Attention(backend),
            "swiglu": backend.swiglu,
            "gated_delta_update": backend.gated_delta,
        }
        self._classes: dict[type, type] = {}
        self._globals: dict[int, dict[str, Any] | None] = {}  # by the id of a Python module's

    def of(self, layer: Any) -> type:
        """The class for a layer, its own if nothing in it is replaced."""
        kind, convolution = type(layer), self._convolution(layer)
        if convolution is not None:
            return convolution
        if kind not in self._classes:
            self._classes[kind] = self._derived(kind)
        return self._classes[kind]

    def _derived(self, kind: type) -> type:
        methods: dict[str, Any] = {}
        for each in reversed(kind.__mro__):
            for name, attribute in vars(each).items():
                methods.pop(name, None)  # of a superclass
                if isinstance(attribute, FunctionType):
                    seen = self._replaced(attribute.__globals__)
                    if seen is not None:
                        methods[name] = _with_globals(attribute, seen)
        if not methods:
            return kind
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        return type(kind.__name__, (kind,), methods | names)

    def _replaced(self, seen: dict[str, Any]) -> dict[str, Any] | None:
        """The globals of a Python module with umbel's functions; None if it has no such name."""
        if id(seen) not in self._globals:
            functions: dict[str, Any] = {
                name: self._functions[name]
                for name, function in _FUNCTIONS.items()
                if seen.get(name) is function
            }
            if seen.get("ChunkedKVCache") is ChunkedKVCache:
                functions["mx"] = CountsByRow()
            self._globals[id(seen)] = seen | functions if functions else None
        return self._globals[id(seen)]


def _with_globals(function: FunctionType, seen: dict[str, Any]) -> FunctionType:
    same = FunctionType(
        function.__code__, seen, function.__name__, function.__defaults__, function.__closure__
    )
    same.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(same, function)
    return same
