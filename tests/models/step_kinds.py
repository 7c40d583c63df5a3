"""What kinds of work a model's runner was asked for: what a GPU compiles or loads kernels for."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from umbel.models.kv import compiled_step
from umbel.models.kv.batch_cache import BatchCache
from umbel.models.kv.buckets import prompt_tokens
from umbel.models.kv.packed import PackedCheckpoint, PackedSpan
from umbel.models.kv.placement import Placement
from umbel.models.kv.prefix_groups import prefix_groups
from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.kv.stored import DiskCodec
from umbel.models.moves import Enter, Leave, MakeContiguous, Move, Pack, Relocate, Resize
from umbel.models.outputs import ForwardOutput, NextToken, PendingToken
from umbel.models.params import Row, SamplingParams
from umbel.models.runner import ModelRunner
from umbel.models.step_plan import Call, Kind, StepPlan

CUDNN_READS = 256
"""Tokens in one piece from which on MLX has cuDNN decode one sequence on CUDA."""

Label = tuple[Any, ...]
"""A kind of work: its name, and what of it makes other kernels."""


def few(count: int) -> int:
    """Count none, one, and several: more of the same are the same kernels."""
    return min(count, 2)


class Recorder:
    """Notes kinds of work while it is on.

    Attributes:
        seen: what was met since it was last emptied.
    """

    def __init__(self) -> None:
        self.seen = set[Label]()
        self._reading = set[Label]()  # what is read by the step that comes next

    def note(self, *label: Any) -> None:
        """Have met one."""
        self.seen.add(label)

    @contextmanager
    def on(self) -> Iterator["Recorder"]:
        """Listen until the block ends, to every runner of this process."""
        with pytest.MonkeyPatch.context() as patch:
            self._listen(patch, ModelRunner, "run", self._ran)
            self._listen(patch, ModelRunner, "sample", self._sampled)
            self._listen(patch, ModelRunner, "prefill", self._prefilled)
            self._listen(patch, Placement, "capture", self._captured)
            self._listen(patch, Placement, "take_packed", self._taken)
            self._listen(patch, BatchCache, "read", self._reads)
            self._listen(patch, compiled_step, "_traced", self._traced)
            self._listen(patch, PackedSpan, "join", lambda *_: self.note("join"))
            self._listen(patch, PackedSpan, "copy", lambda *_: self.note("copy"))
            self._listen(patch, PackedCheckpoint, "restore_all", lambda *_: self.note("restore"))
            for name in ("export_span", "export_checkpoint"):
                self._listen(patch, DiskCodec, name, lambda *_, name=name: self.note(name))
            yield self

    @staticmethod
    def _listen(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Any) -> None:
        real = getattr(owner, name)

        def heard(*args: Any, **options: Any) -> Any:
            note(*args)
            return real(*args, **options)

        patch.setattr(owner, name, heard)

    def _ran(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        caches: Sequence[SequenceCache],
        tokens: Sequence[NextToken],
        *_: Any,
    ) -> None:
        assert plan.decode is not None
        pending = {isinstance(token, PendingToken) for token in tokens}
        self.note("tokens", *sorted(pending))
        known = {cache.number: cache for cache in caches}
        for call in plan.decode.calls:
            for move in call.moves:
                self.seen |= set(_of_move(move, runner.placement))
            if call.kind is Kind.BATCH:
                self.seen |= set(_of_batch(call))
            else:
                self.seen |= {_of_own_caches(call, known[n]) for n in call.sequences}

    def _sampled(self, runner: ModelRunner, output: ForwardOutput, rows: Mapping[int, Row]) -> None:
        del runner
        assert output.logits is not None
        params = [row.params for row in rows.values()]
        self.note("sampled", "of all", list(rows) == list(range(output.logits.shape[0])))
        self.note("sampled", "greedy", all(p.greedy for p in params))
        self.note("sampled", "masked", any(row.mask is not None for row in rows.values()))
        self.note("sampled", "penalised", any(map(_penalises, params)))
        self.note("sampled", "filtered", any(p.top_k or p.top_p < 1 or p.min_p for p in params))
        self.note("sampled", "told", any(p.top_logprobs is not None for p in params))

    def _prefilled(
        self, runner: ModelRunner, chunks: Sequence[tuple[Sequence[int], SequenceCache]]
    ) -> None:
        if len(chunks) > 1:
            self.seen |= set(_of_prompts(chunks, runner.device.prompt_multiple))
            return
        ((tokens, cache),) = chunks
        before = len(cache.prefix), bool(cache.suffix_length)
        self.note("prefill", "tokens", len(tokens).bit_length())
        self.note("prefill", "after", few(before[0]), before[1], len(tokens) == 1)

    def _captured(self, _: Placement, cache: SequenceCache) -> None:
        self.note("capture", cache.slot is not None)

    def _reads(self, *told: Any) -> None:
        self._reading = set(_of_reading(*told))
        self.seen |= self._reading

    def _traced(self, *_: Any) -> None:
        self.seen |= {("compiled", *label) for label in self._reading}

    def _taken(self, _: Placement, cache: SequenceCache) -> None:
        if cache.suffix_length:
            self.note("take packed", cache.slot is not None)


def _of_prompts(
    chunks: Sequence[tuple[Sequence[int], SequenceCache]], multiple: int
) -> Iterator[Label]:
    """What makes other kernels of a call of several prompts."""
    caches, lengths = [cache for _, cache in chunks], [len(tokens) for tokens, _ in chunks]
    width = prompt_tokens(max(lengths), len(lengths), multiple)
    if multiple > 1:
        yield "together", "tokens", len(lengths), width
    groups = prefix_groups({row: cache.prefix for row, cache in enumerate(caches)})
    yield "together", "padded", min(lengths) < width
    yield "together", "own tokens", any(cache.suffix_length for cache in caches)
    yield "together", "own spans", any(len(group.slots) == 1 for group in groups)
    for group in groups:
        if len(group.slots) > 1:
            yield "together", "shared by all", len(group.slots) == len(chunks)


def _of_move(move: Move, placement: Placement) -> Iterator[Label]:
    match move:
        case Enter():
            yield "enter", few(move.spans), move.tokens > 0
            yield "wipe", move.reused
        case Leave() | Pack():
            yield type(move).__name__, move.tokens > 0, move.merges > 0
        case Resize():
            had = 0 if placement.suffixes is None else placement.suffixes.positions
            yield "resize", move.renewed
            if not move.renewed:
                yield "more rows", move.rows > placement.rows
                yield "fewer rows", move.rows < placement.rows
                yield "more positions", move.positions > had
        case Relocate() | MakeContiguous():
            yield (type(move).__name__,)


def _of_batch(call: Call) -> Iterator[Label]:
    yield "positions", call.rows, call.positions
    for window, positions in call.windows:
        yield "window", window, call.rows, positions
    yield "rows", call.rows
    yield "gathered", call.slots != tuple(range(call.rows))
    yield "put together", call.shared > 0, call.padded > 0


def _of_reading(
    batch: BatchCache, shared: Sequence[tuple[Any, Any]], private: Mapping[int, Any], everyone: int
) -> Iterator[Label]:
    """What makes other kernels of what rows read besides their own tokens."""
    stacks = batch.stacks.read_by(batch.rows)
    yield "merge", min(1 + len(shared) + bool(stacks) + bool(private), 5)
    for runs, slots in shared:
        yield "shared", len(slots) == everyone, few(len(runs))
    yield "stacks", few(len(stacks))
    yield "private rows", few(len(private))
    yield "private runs", few(max(map(len, private.values()), default=0))
    for stack, slots in stacks:
        yield "stack", "masked", stack.mask is not None
        yield "stack", "in order", slots is None
    for planned in batch.stacks.plan:
        yield "stack", "made", planned.made


def _of_own_caches(call: Call, cache: SequenceCache) -> Label:
    moves = {type(move) for move in call.moves}
    contiguous = cache.is_contiguous or MakeContiguous in moves
    prefix = 0 if contiguous else few(len(cache.prefix) + (Leave in moves))
    by_cudnn = contiguous and cache.offset >= CUDNN_READS
    return call.kind.name, prefix, contiguous, by_cudnn


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or bool(
        params.presence_penalty or params.frequency_penalty or params.logit_bias
    )
