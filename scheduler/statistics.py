"""What the engine tells of itself, as plain data that crosses threads."""

import msgspec

from ..cachestore.prefix_cache import CacheStatistics
from .sequence import Sequence, SequenceStatus


class SequenceStatistics(msgspec.Struct, frozen=True):
    """One running sequence as `/status` shows it."""

    request: str
    tenant: str
    conversation: str
    status: SequenceStatus
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has done and is doing, as of its last step.

    Attributes:
        prefill_tokens: prompt tokens really computed.
        last_step_at: the engine's clock at the end of the last step, or when work came to an
            idle engine, in seconds.
        batch_shapes: shapes of batches that were computed with so far.
        cache: as of the end of the last sequence.
    """

    running: tuple[SequenceStatistics, ...] = ()
    steps: int = 0
    last_step_at: float = 0.0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prefill_tokens: int = 0
    generation_tokens: int = 0
    batch_shapes: int = 0
    cache: CacheStatistics = CacheStatistics()


def describe(sequence: Sequence) -> SequenceStatistics:
    """Take the picture of one sequence."""
    return SequenceStatistics(
        request=sequence.request.id,
        tenant=sequence.request.tenant,
        conversation=sequence.request.conversation,
        status=sequence.status,
        prompt_tokens=sequence.num_prompt_tokens,
        cached_tokens=sequence.num_cached_tokens,
        computed_tokens=sequence.num_computed_tokens,
        output_tokens=len(sequence.output),
    )
