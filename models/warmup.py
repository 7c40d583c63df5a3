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
from .runner import ModelRunner

if TYPE_CHECKING:
    from .outputs import NextToken

_PROMPT = list(range(8))
_STEPS = 3  # a shape's second step may still cost more than its third
_TOGETHER = 3  # rows that share what they lease, beside some that do not


def longest(runner: ModelRunner) -> int:
    """Tokens of the longest sequence: a row reads so many where they lie, if nobody shares them."""
    return runner.rules.own + len(_PROMPT)


def warm_up(runner: ModelRunner, max_batch: int) -> None:
    """Decode in all numbers of rows that a batch may have, and in batches that are mixed.

    It needs memory for `max_batch` sequences of `longest` tokens, and leaves none taken.
    """
    start = runner.open()
    runner.prefill(_PROMPT, start)
    checkpoint = start.capture() if start.non_trimmable else None
    spans = start.take_packed()

    def shared(count: int) -> list[SequenceCache]:
        return [runner.open(len(_PROMPT), spans, checkpoint) for _ in range(count)]

    most = max_batch if runner.batches else 1
    for count in sorted({min(bucket(count), most) for count in range(1, most + 1)}):
        _decode(runner, shared(count))
    for apart in (LOOSE, LOOSE + 1):  # read one by one, and side by side; one of 6 rows is free
        if most >= _TOGETHER + apart:
            _decode(runner, [*shared(_TOGETHER), *[_long(runner) for _ in range(apart)]])


def _long(runner: ModelRunner) -> SequenceCache:
    first = runner.open()
    tokens = longest(runner)
    runner.prefill(list(itertools.islice(itertools.cycle(_PROMPT), tokens)), first)
    checkpoint = first.capture() if first.non_trimmable else None
    return runner.open(tokens, first.take_packed(), checkpoint)


def _decode(runner: ModelRunner, caches: list[SequenceCache]) -> None:
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
    for cache in caches:
        runner.placement.close(cache)
