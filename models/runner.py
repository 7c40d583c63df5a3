"""The only calls of the model: prefill, decode steps as they were planned, and sampling.

A decode step has three parts, so that the device never waits for the host: `run` launches the
model on tokens that may themselves still be computed; `sample` launches sampling; the output's
`read` waits for the tokens. Between the second and the third comes the next step's `run`.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import structlog

from .attention.exact import can_be_exact, exact_layers
from .backends.prepare import OutputRows, prepare
from .kv.batch_cache import BatchCache
from .kv.checkpoints import PackedCheckpoint
from .kv.disk_format import StateForm
from .kv.placement import Placement
from .kv.sequence_cache import SequenceCache
from .kv.spans import PackedSpan
from .load.loader import LoadedModel
from .load.memory_probe import measure
from .load.probe import Probed, interruptible, probe, probed_once
from .load.trials import Trials
from .memory_profile import Held
from .params import Row
from .planner import Rules, plan_step, rules_of
from .runtime import launch, launch_in_turn, peak_of, resident_bytes
from .sampling import ForwardOutput, NextToken, SamplerOutput, gather, sample, stacked
from .step_plan import EXACT_ROWS, Call, Kind, StepPlan

_NOT_EXACT = "exact rows attend each by itself, and this model's attention takes them together"

_FEW_LOGITS = 16
"""Tokens of a prompt's last call where a model computes the logits of all of them."""

log = structlog.get_logger()


def prefill(model: Any, tokens: Sequence[int], cache: SequenceCache) -> None:
    """Advance a sequence over tokens of its prompt, at least one, and wait for its state."""
    _advance(model, tokens, cache)
    mx.eval(cache.arrays())


def complete(
    model: Any, tokens: Sequence[int], cache: SequenceCache, outputs: OutputRows
) -> mx.array:
    """Advance a sequence over its prompt's last tokens, and wait for its state and logits.

    Returns:
        `[1, V]` logits of the token that follows.
    """
    with outputs.only([len(tokens) - 1]):
        logits = _advance(model, tokens, cache)[:, -1]
    mx.eval(logits, cache.arrays())
    return logits


def _advance(model: Any, tokens: Sequence[int], cache: SequenceCache) -> mx.array:
    logits: mx.array = model(mx.array([tokens]), cache=cache.layers)
    cache.add_tokens(len(tokens))
    cache.detach()
    return logits


class ModelRunner:
    """Runs one loaded model. All methods belong to the MLX thread.

    Args:
        loaded: the model.
        exact: the same request gives the same tokens, whatever else runs and whatever is
            cached: every step computes with `EXACT_ROWS` rows, and each attends by itself.
        measured: the folder that keeps measurements for later starts; None keeps none.
        go_on: called before each call of the model while it is tried out and measured. An error
            that it raises ends that; only earlier results are kept.

    Attributes:
        batches: sequences decode as rows of one batch. A model for which that would change answers
            decodes them one by one.
        one_by_one: the reason against batches, in words; None if there is none.
        shapes: of all batches so far.
        profile: memory of sequences and steps.
        resident: bytes that were active when it was made: the weights.
        backend: how it is run.
        limits: the backend's.
        overlaps: see `Limits`.
        placement: of the sequences' state.
        rules: of plans.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        exact: bool = False,
        measured: Path | None = None,
        go_on: Callable[[], object] = lambda: None,
    ) -> None:
        self._exact = exact
        self._model = loaded.model
        self._layout = loaded.layout
        self._vocab_size = loaded.text.vocab_size
        self.shapes: set[tuple[int, ...]] = set()
        self.backend = loaded.backend
        self.limits = loaded.backend.limits
        self.overlaps = self.limits.overlaps
        gc.collect()  # garbage of loading would count as weights
        self.resident = resident_bytes()
        self._outputs = prepare(loaded.model, self.backend)
        with interruptible(loaded.model, go_on) as model:
            self._probed = self._try_out(loaded, model, measured)
        self.use(rules_of(self.limits, self._probed, exact=exact))

    def _try_out(self, loaded: LoadedModel, model: Any, measured: Path | None) -> Probed:
        """Find out how the model's sequences run together, and measure their memory."""
        exact, backend, layout = self._exact, self.backend, loaded.layout
        of = () if measured is None else (loaded.fingerprint, backend)
        probed = probed_once(
            measured, of, lambda: probe(Trials(model, layout), backend, self._outputs)
        )
        if exact and (probed.mask_axes or not can_be_exact(layout.open().layers)):
            probed = Probed(_NOT_EXACT, head_known=probed.head_known)
        self._outputs.known = probed.head_known
        self.one_by_one = probed.one_by_one
        self.batches = self.one_by_one is None
        self.profile = measure(
            layout,
            lambda tokens, cache: prefill(model, tokens, cache),
            backend,
            loaded.text.vocab_size,
            contiguous=exact,
            multiple=EXACT_ROWS if exact and self.batches else 1,
            folder=measured,
            of=of,
        )
        return probed

    def use(self, rules: Rules) -> None:
        """Plan by other rules. No sequence may run."""
        batch = None
        if self.batches and not self._exact:
            like = self._layout.open().layers
            batch = BatchCache(like, self.backend, mask_axes=self._probed.mask_axes)
            rules = replace(rules, chunked=frozenset(batch.chunked))
        self.rules = rules
        self.placement = Placement(self._layout, batch)

    def live_within(self, budget: int, *, max_batch: int) -> None:
        """Limit running sequences to a budget; see `Rules.within`. None may run yet."""
        self.use(self.rules.within(budget, self.profile.sizes, max_batch=max_batch))

    # -- state -------------------------------------------------------------------------

    def open(
        self,
        offset: int = 0,
        spans: Sequence[PackedSpan] = (),
        checkpoint: PackedCheckpoint | None = None,
    ) -> SequenceCache:
        """Make the state of a sequence that resumes at `offset`; see `CacheLayout.open`."""
        return self._layout.open(offset, spans, checkpoint)

    def state_form(self) -> StateForm:
        """Compute a short prompt, and return the form of its state."""
        cache = self.open()
        try:
            self.prefill([0, 0], cache)
            checkpoint = self.placement.capture(cache) if self._layout.has_checkpoints else None
            return StateForm(self.placement.suffix_span(cache), checkpoint)
        finally:
            self.placement.close(cache)

    def held_by(self, caches: Iterable[SequenceCache]) -> Held:
        """Memory of the state that running sequences do not lease."""
        parts = [*[cache.held() for cache in caches], self.placement.held()]
        return Held(sum(part.nbytes for part in parts), sum(part.buffers for part in parts))

    # -- steps -------------------------------------------------------------------------

    def plan(
        self,
        decode: Sequence[SequenceCache],
        prefill: tuple[SequenceCache, int] | None = None,
        *,
        completes: bool = False,
        coming: int = 0,
        may_copy: bool = True,
    ) -> StepPlan:
        """Plan a step; see `plan_step`.

        Args:
            decode: see there, as for those that follow.
            prefill: see above.
            completes: the prompt's chunk is its last.
            coming: see above.
            may_copy: see above.
        """
        logits = 0
        if completes and prefill is not None:
            logits = 1 if self._outputs.known else prefill[1]
        return plan_step(
            decode,
            prefill,
            self.placement,
            self.rules,
            logits=logits,
            coming=coming,
            may_copy=may_copy,
        )

    def cost(self, plan: StepPlan) -> Held:
        """Memory of a plan at its peak."""
        return plan.cost(self.profile)

    def prefill(self, tokens: Sequence[int], cache: SequenceCache) -> None:
        """Advance a sequence over tokens of its prompt, and wait for its state. No logits run."""
        offset = cache.offset
        _, peak = peak_of(lambda: prefill(self._model, tokens, cache))
        self.profile.observe(len(tokens), offset, peak)

    def complete(self, tokens: Sequence[int], cache: SequenceCache) -> ForwardOutput:
        """Do so over the last tokens of a prompt, at most `max_completing`.

        Returns:
            The logits of the token that follows.
        """
        offset = cache.offset
        if self._exact and len(tokens) == 1:
            cache.make_contiguous()  # one query would read spans one by one, however they are cut
        logits, peak = peak_of(lambda: complete(self._model, tokens, cache, self._outputs))
        # The plan has a price of its own for the head's logits.
        self.profile.observe(len(tokens), offset, peak - logits.nbytes)
        return ForwardOutput(logits, {})

    @property
    def max_completing(self) -> int:
        """Tokens of a chunk that completes its prompt, at most."""
        return 1 << 62 if self._outputs.known else _FEW_LOGITS

    def run(
        self, plan: StepPlan, caches: Sequence[SequenceCache], tokens: Sequence[NextToken]
    ) -> ForwardOutput:
        """Launch the model as planned, and advance the sequences by a token.

        Args:
            plan: of these sequences in their present places.
            caches: of the sequences that get a token, in the order of the plan.
            tokens: of these.

        Returns:
            The logits of their next tokens.

        Raises:
            Exception: the model failed for the batch; all states in it are lost.
        """
        logits: list[mx.array | None] = []
        errors: dict[int, BaseException] = {}
        at = 0
        calls = () if plan.decode is None else plan.decode.calls
        for call in calls:
            part = slice(at, at + len(call.sequences))
            try:
                given = caches[part], gather(tokens[part])
                logits.append(self._call(call, *given))
            except BaseException as error:
                if call.kind is Kind.BATCH:
                    raise
                # Of this call only: the other calls' sequences are advanced, or will be.
                errors |= dict.fromkeys(range(part.start, part.stop), error)
                logits.append(None)
            at = part.stop
        return ForwardOutput(stacked(logits, [len(call.sequences) for call in calls]), errors)

    def _call(self, call: Call, caches: Sequence[SequenceCache], tokens: mx.array) -> mx.array:
        if call.kind is Kind.BATCH:
            logits = self._together(call, caches, tokens)
        else:
            self.placement.apply(call.moves, {cache.number: cache for cache in caches})
            if call.kind is Kind.EXACT:
                logits = self._exactly(caches, tokens)
            else:
                logits = self._alone(caches, tokens)
        for cache in caches:
            cache.add_tokens(1)
        return logits

    def _together(self, call: Call, caches: Sequence[SequenceCache], tokens: mx.array) -> mx.array:
        placement = self.placement
        try:
            placement.apply(call.moves, {cache.number: cache for cache in caches})
            logits = placement.step(self._model, call, tokens)
            launch(logits, placement.arrays() if self._has_more_than_logits else [])
        except BaseException:
            placement.clear()  # its layers may be at different tokens
            raise
        self._note(placement.shape)
        return logits

    def _alone(self, caches: Sequence[SequenceCache], tokens: mx.array) -> mx.array:
        (cache,) = caches
        logits: mx.array = self._model(tokens[None], cache=cache.layers)[:, -1, :]
        if self.backend.launches_layers and self.placement.batch is not None:
            launch_in_turn(cache.arrays())
        launch(logits, cache.arrays() if self._has_more_than_logits else [])
        return logits

    def _exactly(self, caches: Sequence[SequenceCache], tokens: mx.array) -> mx.array:
        unused = EXACT_ROWS - len(caches)
        fed = mx.pad(tokens, (0, unused))
        rows = [*[cache.layers for cache in caches], *[None] * unused]
        layers = exact_layers(rows, self.backend)
        logits: mx.array = self._model(fed[:, None], cache=layers)[: len(caches), -1, :]
        launch(logits, [cache.arrays() for cache in caches])
        self._note((EXACT_ROWS,))
        return logits

    @property
    def _has_more_than_logits(self) -> bool:
        """True if a step computes state that its logits do not depend on.

        An indexer's state, before it chooses any token, would be computed at some later step, and
        keep all of its inputs until then.
        """
        return self._layout.has_checkpoints or not self._probed.reads_parts

    def _note(self, shape: tuple[int, ...]) -> None:
        if shape not in self.shapes:
            self.shapes.add(shape)
            log.debug("new shape", rows=shape[0], positions=list(shape[1:]))

    # -- sampling ----------------------------------------------------------------------

    def sample(self, output: ForwardOutput, rows: Mapping[int, Row]) -> SamplerOutput:
        """Launch the choice of tokens for some of the sequences that ran.

        Args:
            output: of `run` or `complete`.
            rows: for each sequence that continues, by its place, how it samples.


        Returns:
            One token for each of `rows`, in their order.
        """
        if output.logits is None or not rows:
            return SamplerOutput.empty()
        logits = output.logits
        if list(rows) != list(range(logits.shape[0])):
            logits = logits[mx.array(list(rows))]
        return sample(logits, list(rows.values()), self._vocab_size, each=self._exact)
