"""Tries out if a loaded model gives a sequence in a batch the logits and state it has alone."""

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_lm
import structlog

from ..backends.base import Backend
from ..backends.prepare import OutputRows
from ..errors import ModelError, ModelLoadError, NotBatchableError
from ..kv.batch_cache import BatchCache
from ..kv.placement import Placement
from ..planner import Rules, plan_decode
from .measured import key_of, measured_once
from .trials import (
    NEIGHBOURS,
    PROBED,
    Outcome,
    Trial,
    Trials,
    allowed,
    deviation,
    difference,
    largest,
    states_of,
)

log = structlog.get_logger()

_NEIGHBOURS_MOVE = 0.01
"""Share of the logits' spread by which neighbours may move a row at most: a step of the same shapes
rounds alike, whatever other rows hold."""

_PACKAGE = __name__.partition(".")[0]
_FORMAT = 8  # of the kept results
_KEPT = ("batches", "mask_axes", "reads_parts", "head_known")

_PROMPT = (6, 7, 8, 9, 10)
_SHORT = 4  # own tokens of the first length class: a trial has several

_MASK_AXES = (0, 4, 5)
"""Ways to try, the cheapest first; see `batch_cache.BatchCache`."""


class Probed(NamedTuple):
    """The results of trying a model out.

    Attributes:
        one_by_one: the reason to decode its sequences one by one; None if batches are exact.
        mask_axes: of its batches; see `batch_cache.BatchCache`.
        reads_parts: a single token's attention reads prefix and suffix one by one. An attention
            that is the model's own, or computes with the keys, asks for them in one piece.
        head_known: the layer that computes logits is known, so that it can compute few.
    """

    one_by_one: str | None
    mask_axes: int = 0
    reads_parts: bool = False
    head_known: bool = False


def probed_once(folder: Path | None, of: Iterable[Any], probe: Callable[[], Probed]) -> Probed:
    """Return the result of an earlier start, if there is one that batches; else of a probe now.

    A reason against batches is not kept, because it is in words.

    Args:
        folder: of the results; None keeps none.
        of: the names of the model and of its backend there.
        probe: tries the model out.
    """

    def figures() -> dict[str, float]:
        why, *others = probe()
        return dict(zip(_KEPT, map(float, (why is None, *others)), strict=True))

    versions = getattr(mx, "__version__", ""), mlx_lm.__version__
    kept = measured_once(folder, key_of("probe", _FORMAT, *versions, *of), {*_KEPT}, figures)
    if not kept["batches"]:
        return probe()
    _, mask_axes, parts, head = (int(kept[name]) for name in _KEPT)
    return Probed(None, mask_axes, bool(parts), bool(head))


class _Interruption(BaseException):
    """Carries an error past code that catches a model's."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def interruptible(model: Any, go_on: Callable[[], object]) -> Iterator[Callable[..., mx.array]]:
    """Yield a function that calls a model after each `go_on`, and raise an error of `go_on`.

    Probes and measurements take dozens of calls, and a daemon that is stopped does not wait for
    them.
    """

    def call(*args: Any, **options: Any) -> mx.array:
        try:
            go_on()
        except Exception as error:  # noqa: BLE001  (it is raised again)
            raise _Interruption(error) from None
        logits: mx.array = model(*args, **options)
        return logits

    try:
        yield call
    except _Interruption as interruption:
        raise interruption.error from None


def probe(trials: Trials, backend: Backend, outputs: OutputRows) -> Probed:
    """Try out how rows of a batch get the logits and state that single sequences get.

    Models use cached keys in many ways (MLA computes with the keys itself, some layers read another
    layer's keys), so this is measured on the loaded model. Three short sequences decode two tokens
    each. Batches must fulfil two conditions:

    - A row's logits do not depend on its neighbours' tokens.
    - Its logits and its state differ from those of the sequence alone by no more than the model's
      own rounding; see `Trials.rounding`.

    Args:
        trials: of the model.
        backend: how attention is computed.
        outputs: of the model.
    """
    head = _head_known(trials, outputs)
    why = []
    for mask_axes in _MASK_AXES:
        reason = _why_not(trials, backend, mask_axes)
        if reason is None:
            return Probed(None, mask_axes, _reads_parts(trials), head)
        why.append(reason)
    return Probed(why[0], head_known=head)


def _why_not(trials: Trials, backend: Backend, mask_axes: int) -> str | None:
    """Try out one way; return the reason against it, or None."""
    rounding = trials.rounding
    try:
        together = _together(trials, backend, PROBED, mask_axes)
        moved = largest(
            deviation(
                _together(trials, backend, trial, mask_axes).logits[:, row],
                together.logits[:, row],
            )
            for row, trial in NEIGHBOURS
        )
    except NotBatchableError as error:
        return str(error)
    except (AttributeError, TypeError, ValueError) as error:
        return explain(error)
    if not moved <= min(_NEIGHBOURS_MOVE, allowed(rounding.logits)):  # a NaN fails, too
        return (
            f"rows of a batch would change each other's answers: with other neighbours logits "
            f"differ by {moved:.2g} of their spread"
        )
    differs = difference(together, trials.alone)
    if differs.within(rounding):
        return None
    return (
        f"rows of a batch would get other answers than alone: logits differ by "
        f"{differs.logits:.2g} of their spread and states by {differs.states:.2g}; the model's "
        f"rounding explains {allowed(rounding.logits):.2g} and {allowed(rounding.states):.2g}"
    )


def _reads_parts(trials: Trials) -> bool:
    cache = trials.prefilled(PROBED)[0]
    for layer in cache.token_layers:
        layer.poison_joined = True
    return not bool(mx.isnan(trials.forward(cache, [3])).any())


def _head_known(trials: Trials, outputs: OutputRows) -> bool:
    """True if the layer that has a head's name computes the logits, and no inner layer does."""
    expected = trials.forward(trials.layout.open(), _PROMPT)[:, -1]
    try:
        with outputs.only([len(_PROMPT) - 1]):
            logits = trials.forward(trials.layout.open(), _PROMPT)
    except Exception as error:  # noqa: BLE001  (all logits are computed then)
        explain(error)
        return False
    if logits.shape[1] != 1:
        return False
    return deviation(logits[:, -1], expected) <= allowed(trials.rounding.logits)


def _together(trials: Trials, backend: Backend, trial: Trial, mask_axes: int) -> Outcome:
    """Decode as rows of one batch: logits `[steps, rows, V]`, and states."""
    layout, caches = trials.layout, trials.prefilled(trial)
    rules = Rules(least_class=_SHORT, gathers=mask_axes > 0)
    like = layout.open().layers
    batch = BatchCache(like, backend, mask_axes=mask_axes)
    placement = Placement(layout, batch)
    logits = []
    for tokens in trial.decoded:
        (call,) = plan_decode(caches, placement, rules).calls
        placement.apply(call.moves, {each.number: each for each in caches})
        logits.append(placement.step(trials.model, call, mx.array(tokens)))
        for each in caches:
            each.add_tokens(1)
    together = mx.stack(logits)
    mx.eval(together)
    return Outcome(together, states_of(caches, placement=placement))


def explain(error: Exception) -> str:
    """Name the reason why a trial of a batch failed.

    A model may use a layer's state in a way that a batch does not support: that raises in the
    model's code. An error in umbel's own code is logged: otherwise it would pass for such a model,
    which is only slower.
    """
    module = _module_of(error)
    if isinstance(error, ValueError) or module.partition(".")[0] != _PACKAGE:
        return f"the model does with a layer's state what a batch cannot: {error}"
    reason = f"a fault of {_PACKAGE}'s own, in {module}: {type(error).__name__}: {error}"
    log.error("batching probe failed; sequences decode one by one", reason=reason)
    return reason


@contextmanager
def failures_in_words(name: str, *passed: type[Exception]) -> Iterator[None]:
    """Turn errors that a model raises while it is tried out into a `ModelLoadError`.

    Args:
        name: of the model.
        passed: errors that have another cause, and pass as they are.

    Raises:
        ModelLoadError: the model failed.
    """
    in_words: tuple[type[Exception], ...] = (ModelError, *passed)
    try:
        yield
    except in_words:
        raise
    except Exception as error:
        log.debug("model failed in its probe", model=name, exc_info=error)
        raise ModelLoadError(
            f"{name} fails when it is tried out, with {type(error).__name__} in "
            f"{_module_of(error)}: {error}"
        ) from error


def _module_of(error: Exception) -> str:
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return str(last.f_globals.get("__name__", ""))
