"""Statistics of the engine and of requests, as plain data that crosses threads."""

import msgspec

from ..cachestore.tries import CacheStatistics
from .sequence import Sequence, SequenceStatus
from .times import Activity, Times


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


class RequestStatistics(SequenceStatistics, frozen=True):
    """One request that waits or runs, as `/status` shows it.

    Attributes:
        priority: "interactive" or "batch".
        activity: what it does or waits for.
        seconds: of each activity so far.
        needed_bytes: what it takes to start, where memory was short for it; None else.
        usable_bytes: what may be held, of which that is; None else.
    """

    priority: str
    activity: Activity
    seconds: dict[Activity, float]
    needed_bytes: int | None
    usable_bytes: int | None


class MemoryUse(msgspec.Struct, frozen=True):
    """The ledger, in bytes; `buffers` counts allocations.

    Attributes:
        budget: what all of it may take at present; less than was configured while the
            system is short of memory.
        kv: of stored and leased tokens.
        checkpoint: of whole states, stored or captured.
        tail: what running sequences have of their own.
        paging: on its way to disk, and nowhere else.
        transient: reserved for the step that runs.
    """

    budget: int = 0
    kv: int = 0
    checkpoint: int = 0
    tail: int = 0
    paging: int = 0
    transient: int = 0
    buffers: int = 0


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """State and totals of the engine, as of its last step.

    Attributes:
        step_seconds: that steps took, each from the end of the one before where requests ran.
        prefill_tokens: prompt tokens really computed.
        last_step_at: the engine's clock at the end of the last step, or when work came to an
            idle engine, in seconds.
        batch_shapes: shapes of batches that were computed with so far.
        preemptions: of running sequences, for lack of memory.
        yields: of running sequences that gave their slots to others.
        page_ins: states that were read back from disk.
        memory: what model state takes.
        cache: as of the end of the last sequence.
    """

    running: tuple[SequenceStatistics, ...] = ()
    steps: int = 0
    step_seconds: float = 0.0
    last_step_at: float = 0.0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prefill_tokens: int = 0
    generation_tokens: int = 0
    batch_shapes: int = 0
    preemptions: int = 0
    yields: int = 0
    page_ins: int = 0
    memory: MemoryUse = MemoryUse()
    cache: CacheStatistics = CacheStatistics()


def describe_request(sequence: Sequence, now: float) -> RequestStatistics:
    """Describe a queued request: its activity, and the seconds of each one so far.

    Args:
        sequence: of the request. It has `times`, since it was queued.
        now: the engine's clock, in seconds.
    """
    times = sequence.times or Times(Activity.SLOT, now)
    needed, usable = sequence.needs or (None, None)
    return RequestStatistics(
        **msgspec.structs.asdict(describe(sequence)),
        priority=sequence.request.priority.name.lower(),
        activity=times.activity,
        seconds={activity: round(seconds, 3) for activity, seconds in times.seconds(now).items()},
        needed_bytes=needed,
        usable_bytes=usable,
    )


def describe(sequence: Sequence) -> SequenceStatistics:
    """Take the picture of one sequence."""
    return SequenceStatistics(
        request=sequence.request.id,
        tenant=sequence.request.tenant,
        conversation=sequence.request.conversation,
        status=sequence.status,
        prompt_tokens=sequence.num_prompt_tokens,
        cached_tokens=sequence.cached,
        computed_tokens=sequence.num_computed_tokens,
        output_tokens=len(sequence.output),
    )
