"""Whether a loaded model decodes in batches what it decodes alone."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from .batch import NotBatchableError
from .device import DevicePolicy
from .layer_states import LayerStack, LiveStates
from .rows import Rows

_PROBED = ((3, 4, 5), (6, 7, 8))
"""Tokens that are decoded, by step and row."""

_BOUND = 0.05
"""Of the logits' spread: rounding is far below it, and another row's keys far above it."""


def why_one_by_one(model: Any, stack: LayerStack, device: DevicePolicy) -> str | None:
    """Try out whether the model gives rows of a batch what it gives single sequences.

    Models use what their caches return in many ways (MLA computes with the keys itself, some
    layers read another layer's keys), so this is measured on the loaded model, and not looked
    up: two short sequences over a shared trunk and one without decode two tokens each.

    Args:
        model: mlx-lm's.
        stack: of its layers.
        device: how attention is computed.

    Returns:
        Why its sequences must decode one by one; None if they can run in batches.
    """
    together, apart = _probes(model, stack)
    try:
        rows = Rows(stack.open(), device, own=2)  # so that rows read trunks of their own, too
        rows.join(together)
        logits = []
        for tokens in _PROBED:
            logits.append(rows.feed(model, together, mx.array(tokens)))
            for states in together:
                states.advanced(1)
    except NotBatchableError as error:
        return str(error)
    except (AttributeError, TypeError, ValueError) as error:
        return f"the model does with a layer's state what a batch cannot: {error}"
    expected = [
        mx.concatenate([_feed(model, s, [t])[:, -1] for t, s in zip(tokens, apart, strict=True)])
        for tokens in _PROBED
    ]
    for pair in zip(logits, expected, strict=True):
        deviation = _deviation(*pair)
        if not deviation < _BOUND:  # a NaN is no answer either
            return (
                f"rows of a batch would change each other's answers: logits differ by "
                f"{deviation:.1%} of their spread, and {_BOUND:.0%} are allowed"
            )
    return None


def _probes(model: Any, stack: LayerStack) -> Iterator[list[LiveStates]]:
    """Prefill twice three sequences of different lengths; two lease what is long enough."""
    shared = stack.open()
    _feed(model, shared, [1, 2, 3, 4] * 12)
    span = shared.seal()
    spans = [] if span is None else [span]
    checkpoint = shared.capture() if stack.has_checkpoints else None
    for _ in range(2):
        first, second = (stack.open(shared.offset, spans, checkpoint) for _ in range(2))
        third = stack.open()
        for states, tokens in ((first, [6, 7, 8]), (second, [9]), (third, [2, 9, 4, 1])):
            _feed(model, states, tokens)
        yield [first, second, third]


def _feed(model: Any, states: LiveStates, tokens: list[int]) -> mx.array:
    logits: mx.array = model(mx.array([tokens]), cache=states.caches)
    states.advanced(len(tokens))
    mx.eval(logits, states.arrays())
    return logits


def _deviation(logits: mx.array, expected: mx.array) -> float:
    """The mean difference of logits `[B, V]`, as a share of the standard deviation of a row."""
    expected = expected.astype(mx.float32)
    spread = mx.sqrt(mx.var(expected, axis=-1)).max()
    return float(mx.abs(logits.astype(mx.float32) - expected).mean() / spread)
