"""Warm-up: a prompt and batches of 1, 2, 4 … rows, computed before the first request.

CUDA compiles or loads a kernel at its first use: the first batch of four rows took 5 s on an H200
that had never run the model. Streams would stand still for that long. Later processes find the
compiled kernels on disk. Metal takes milliseconds.
"""

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import structlog

from .kv.checkpoints import PackedCheckpoint
from .kv.sequence_cache import SequenceCache
from .kv.spans import PackedSpan
from .params import Row, SamplingParams
from .runner import ModelRunner
from .sampling import NextToken

SECONDS = 40.0
"""No call begins after this time."""

TURN = 16
"""Tokens of each sequence's own prompt, and of the last chunk of the shared one."""

_WORDS = range(8)  # the tokens of all prompts
_STEPS = 3  # per number of rows: the batch is made, grows by a token, and overlaps the step before
_OTHERS = 4  # one row in this many has a prompt of its own: not all read the shared one
_NO_LIMIT = 1 << 62
_GREEDY = SamplingParams(seed=0, temperature=0.0)
_DRAWN = SamplingParams(seed=0)
_EVERYTHING = SamplingParams(
    seed=0,
    top_p=0.9,
    top_k=20,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    top_logprobs=5,
)

log = structlog.get_logger()

_Prefix = tuple[int, Sequence[PackedSpan], PackedCheckpoint | None]
"""Arguments of `ModelRunner.open`."""
_NOTHING: _Prefix = (0, (), None)


class _LimitError(Exception):
    """The next call would exceed the time or the memory; the message says which."""


def warm_up(
    runner: ModelRunner,
    max_batch: int,
    *,
    chunk: int,
    nbytes: int = _NO_LIMIT,
    clock: Callable[[], float] = time.monotonic,
    go_on: Callable[[], object] = lambda: None,
) -> None:
    """Compute a prompt in chunks, then decode with 1, 2, 4 … rows; keep no state.

    Most rows share the prompt, like a system prompt. A warm-up that would exceed a limit stops
    early and logs which one.

    Args:
        runner: of the model. Nothing may run on it.
        max_batch: the most sequences that run at once.
        chunk: the most tokens of a prompt that are computed at once.
        nbytes: upper bound of state and of computing, together.
        clock: seconds, monotonic.
        go_on: called before each call of the model. An error that it raises ends the warm-up.
    """
    began = clock()
    run = _WarmUp(runner, nbytes, lambda: clock() - began < SECONDS, go_on)
    sizes = _batch_sizes(max_batch if runner.batches else 1)
    done = 0
    try:
        run.compute(chunk, TURN)
        for rows in sizes:
            run.decode(rows)
            done = rows
    except _LimitError as error:
        log.warning("warm-up stopped early", reason=str(error), rows=done, of=sizes[-1])
    finally:
        run.close()
    log.info("warmed up", rows=done, steps=run.steps, seconds=round(clock() - began, 1))


def _batch_sizes(most: int) -> list[int]:
    """Powers of two below `most`, and `most` itself."""
    return [*(1 << n for n in range((most - 1).bit_length())), most]


class _WarmUp:
    """The sequences and the shared state of one warm-up."""

    def __init__(
        self,
        runner: ModelRunner,
        nbytes: int,
        has_time: Callable[[], bool],
        go_on: Callable[[], object],
    ) -> None:
        self.steps = 0
        self._runner = runner
        self._nbytes = nbytes
        self._has_time = has_time
        self._go_on = go_on
        self._caches: list[SequenceCache] = []
        self._prompt = _NOTHING
        self._held = 0  # bytes of its stored state

    def compute(self, *chunks: int) -> None:
        """Compute the prompt that rows share, in chunks of so many tokens, and store its state."""
        cache, checkpoint = self._open(_NOTHING), None
        for tokens in chunks:
            self._prefill(cache, tokens, completes=False)
        if cache.non_trimmable:
            self._allow(self._runner.profile.captured(cache.offset).nbytes)
            checkpoint = self._runner.placement.capture(cache)
            self._held += checkpoint.nbytes
        self._allow(2 * self._runner.profile.kept(cache.suffix_length))
        span = self._runner.placement.suffix_span(cache)
        spans = [] if span is None else [span]
        self._held += sum(span.nbytes for span in spans)
        self._prompt = cache.offset, spans, checkpoint
        self.close()

    def decode(self, rows: int) -> None:
        """Start sequences until there are so many, and decode a few steps.

        Then one sequence ends, and the others decode beside a row that is free.
        """
        for row in range(len(self._caches), rows):
            own = row % _OTHERS == _OTHERS // 2
            self._prefill(self._open(_NOTHING if own else self._prompt), TURN, completes=True)
        tokens: list[NextToken] = [_WORDS[0]] * rows
        for _ in range(_STEPS):
            tokens = self._step(tokens)
        if rows > 1:
            self._runner.placement.close(self._caches.pop())
            self._step(tokens[:-1])

    def close(self) -> None:
        """End all sequences."""
        for cache in self._caches:
            self._runner.placement.close(cache)
        self._caches = []

    def _open(self, prefix: _Prefix) -> SequenceCache:
        cache = self._runner.open(*prefix)
        self._caches.append(cache)
        return cache

    def _step(self, tokens: Sequence[NextToken]) -> list[NextToken]:
        """Decode one token of each sequence; sample it in every way that requests sample."""
        plan = self._runner.plan(self._caches)
        self._allow(self._runner.cost(plan).nbytes)
        output = self._runner.run(plan, self._caches, tokens)
        if output.logits is None:
            raise next(iter(output.errors.values()))
        rows = len(tokens)
        for options in _samplings(output.logits.shape[-1]):
            each = itertools.cycle(options)
            sampled = self._runner.sample(output, {row: next(each) for row in range(rows)})
        self.steps += 1
        return [sampled.pending(row) for row in range(rows)]

    def _prefill(self, cache: SequenceCache, tokens: int, *, completes: bool) -> None:
        plan = self._runner.plan([], (cache, tokens), completes=completes)
        self._allow(self._runner.cost(plan).nbytes)
        words = list(itertools.islice(itertools.cycle(_WORDS), tokens))
        if completes:
            self._runner.complete(words, cache)
        else:
            self._runner.prefill(words, cache)

    def _allow(self, nbytes: int) -> None:
        """Raise a `_LimitError` unless there are time and `nbytes` more for the next call."""
        self._go_on()
        if not self._has_time():
            raise _LimitError("time")
        held = self._runner.held_by(self._caches).nbytes + self._held
        if held + nbytes > self._nbytes:
            raise _LimitError("memory")


def _samplings(vocab: int) -> list[list[Row]]:
    """Options of the rows, in turn: masked with all options, drawn, both kinds, and greedy."""
    mask = np.full(-(-vocab // 32), 2**32 - 1, np.uint32)
    masked = Row(_EVERYTHING, _WORDS, _WORDS, mask)
    greedy, drawn = (Row(params, _WORDS, _WORDS) for params in (_GREEDY, _DRAWN))
    return [[masked], [drawn], [greedy, drawn], [greedy]]
