"""Steps that are run before the first request, so that none waits for kernels to be compiled.

What a CUDA device has not computed yet it compiles, or loads, when it meets it: the first batch
of four rows took 5 seconds on a machine that had never seen one, and the first rows of which some
share, some do not and some are free 3 more (one H200, 8B shapes). Streams would stand still for
it. In later processes the same steps take a tenth of a second each, because MLX keeps on disk
what it compiled.
"""

import itertools
from typing import TYPE_CHECKING

from .kv.buckets import bucket
from .kv.sequence_cache import SequenceCache
from .kv.stacking import LOOSE
from .params import Row, SamplingParams
from .planner import SHARED
from .runner import ModelRunner

if TYPE_CHECKING:
    from .outputs import NextToken

_PROMPT = list(range(8))
_COMMON = SHARED + len(_PROMPT)  # tokens that rows read together
_STEPS = 3  # a shape's second step may still cost more than its third
_TOGETHER = 3  # rows that share what they lease, beside some that do not
_DEEPER = 2  # of these, that share more


def longest(runner: ModelRunner) -> int:
    """Tokens of the longest sequence: a row reads so many where they lie, if nobody shares them."""
    return max(runner.rules.own + len(_PROMPT), 2 * _COMMON)


def warm_up(runner: ModelRunner, max_batch: int) -> None:
    """Decode in all numbers of rows that a batch may have, and in batches that are mixed.

    What rows read in parts is merged by one kernel for each number of parts: two to five of them.
    It needs memory for `max_batch` sequences of `longest` tokens, and leaves none taken.
    """
    most = max_batch if runner.batches else 1
    shared = _Prompt(runner, _COMMON)
    for count in sorted({min(bucket(count), most) for count in range(1, most + 1)}):
        _decode(runner, shared.open(count))
    if most >= _TOGETHER + LOOSE:  # one of 6 rows is free
        _decode(runner, [*shared.open(_TOGETHER), *_apart(runner, LOOSE)])
    if most >= _TOGETHER + LOOSE + 2:
        deeper = _Prompt(runner, _COMMON, shared)
        caches = [*shared.open(_TOGETHER - _DEEPER), *deeper.open(_DEEPER)]
        caches += _apart(runner, LOOSE + 1)
        _run(runner, caches)
        _decode(runner, [*caches, *_apart(runner, 1)])  # who comes is read by itself


class _Prompt:
    """What sequences start from.

    Args:
        runner: of the model.
        tokens: of it.
        after: another one, which is its beginning.
    """

    def __init__(self, runner: ModelRunner, tokens: int, after: "_Prompt | None" = None) -> None:
        self._runner = runner
        first = runner.open() if after is None else after.open(1)[0]
        runner.prefill([(list(itertools.islice(itertools.cycle(_PROMPT), tokens)), first)])
        self._tokens = first.offset
        self._checkpoint = first.capture() if first.non_trimmable else None
        self._spans = [*first.leased, *first.take_packed()]

    def open(self, count: int) -> list[SequenceCache]:
        """Start so many sequences."""
        return [
            self._runner.open(self._tokens, self._spans, self._checkpoint) for _ in range(count)
        ]


def _apart(runner: ModelRunner, count: int) -> list[SequenceCache]:
    """Start sequences with long prompts of their own."""
    return [_Prompt(runner, longest(runner)).open(1)[0] for _ in range(count)]


def _decode(runner: ModelRunner, caches: list[SequenceCache]) -> None:
    """Run sequences, and end them."""
    _run(runner, caches)
    for cache in caches:
        runner.placement.close(cache)


def _run(runner: ModelRunner, caches: list[SequenceCache]) -> None:
    """Run, sample, and run what was sampled, each time in another order."""
    rows = {
        number: Row(SamplingParams(seed=0, temperature=float(number % 2)), _PROMPT, ())
        for number in range(len(caches))
    }
    tokens: list[NextToken] = [_PROMPT[0]] * len(caches)
    for _ in range(_STEPS):
        output = runner.sample(runner.run(runner.plan(caches), caches, tokens), rows)
        pending = [output.pending(place) for place in range(len(caches))]
        caches, tokens = [*caches[1:], caches[0]], [*pending[1:], pending[0]]
    output.read()
