"""Steps of a real model, planned and run at once."""

from collections.abc import Sequence

from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.kv.spans import PackedSpan
from umbel.models.outputs import ForwardOutput, NextToken
from umbel.models.runner import ModelRunner


def run(
    runner: ModelRunner,
    caches: Sequence[SequenceCache],
    tokens: Sequence[NextToken],
    *,
    may_copy: bool = True,
) -> ForwardOutput:
    """Give each sequence a token; see `plan_step`."""
    return runner.run(runner.plan(caches, may_copy=may_copy), caches, tokens)


def in_one_piece(parts: Sequence[PackedSpan]) -> PackedSpan | None:
    """Merge consecutive spans; None where there are none."""
    whole = parts[0] if parts else None
    for part in parts[1:]:
        assert whole is not None
        whole = whole.merge(part)
    return whole
