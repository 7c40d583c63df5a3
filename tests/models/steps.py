"""Steps of a real model, planned and run at once."""

from collections.abc import Sequence

from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.runner import ModelRunner
from umbel.models.sampling import ForwardOutput, NextToken


def run(
    runner: ModelRunner,
    caches: Sequence[SequenceCache],
    tokens: Sequence[NextToken],
    *,
    may_copy: bool = True,
) -> ForwardOutput:
    """Give each sequence a token; see `plan_step`."""
    return runner.run(runner.plan(caches, may_copy=may_copy), caches, tokens)
