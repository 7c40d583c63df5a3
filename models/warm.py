"""Steps that are run before the first request, so that none waits for kernels to be compiled.

What a CUDA device has not computed yet it compiles, or loads, when it meets it: the first batch
of four rows took 5 seconds on a machine that had never seen one, and the first rows of which some
share, some do not and some are free 3 more (one H200, 8B shapes). Streams would stand still for
it. In later processes the same steps take a tenth of a second each, because MLX keeps on disk
what it compiled.
"""

import itertools

from .dense import bucket
from .forward import Entry, Forward
from .layer_states import LiveStates
from .params import Row, SamplingParams
from .rows import OWN

_PROMPT = list(range(8))
TOKENS = OWN + len(_PROMPT)
"""Of the longest sequence: a row reads so many where they lie, if nobody shares them."""

_STEPS = 3  # a shape's second step may still cost more than its third
_TOGETHER, _APART = 3, 2  # rows that share what they lease, and that do not; one of 6 is free


def warm(forward: Forward, max_batch: int) -> None:
    """Decode in all numbers of rows that a batch may have, and in one batch that is mixed.

    It needs memory for `max_batch` sequences of `TOKENS`, and leaves none taken.
    """
    start = forward.open()
    forward.prefill(_PROMPT, start)
    checkpoint = start.capture() if start.wholes else None
    spans = start.seal_parts()

    def shared(count: int) -> list[LiveStates]:
        return [forward.open(len(_PROMPT), spans, checkpoint) for _ in range(count)]

    most = max_batch if forward.batches else 1
    for count in sorted({min(bucket(count), most) for count in range(1, most + 1)}):
        _decode(forward, shared(count))
    if most >= _TOGETHER + _APART:
        _decode(forward, [*shared(_TOGETHER), *[_long(forward) for _ in range(_APART)]])


def _long(forward: Forward) -> LiveStates:
    states = forward.open()
    forward.prefill(list(itertools.islice(itertools.cycle(_PROMPT), TOKENS)), states)
    states.seal_tail()
    return states


def _decode(forward: Forward, sequences: list[LiveStates]) -> None:
    """Feed, choose, and feed what was chosen, each time in another order."""
    rows = {
        number: Row(SamplingParams(seed=0, temperature=float(number % 2)), _PROMPT, ())
        for number in range(len(sequences))
    }
    entries: list[Entry] = [(states, _PROMPT[0]) for states in sequences]
    for _ in range(_STEPS):
        choice = forward.choose(forward.feed(entries), rows)
        drawn = [(states, forward.drawn(choice, n)) for n, (states, _) in enumerate(entries)]
        entries = [*drawn[1:], drawn[0]]
    choice.read()
    for states in sequences:
        states.close()
