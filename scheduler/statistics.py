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
    """One request that waits or runs, as `/status` shows it."""

    priority: str  # "interactive" or "batch"
    activity: Activity  # what it does or waits for
    seconds: dict[Activity, float]  # of each activity so far
    needed_bytes: int | None  # what it takes to start, where memory was short for it; None else
    usable_bytes: int | None  # what may be held, of which that is; None else


class MemoryUse(msgspec.Struct, frozen=True):
    """The ledger, in bytes; `buffers` counts allocations."""

    budget: int = 0  # what all may take at present; less while the system is short of memory
    kv: int = 0  # of stored and leased tokens
    checkpoint: int = 0  # of whole states, stored or captured
    tail: int = 0  # what running sequences have of their own
    paging: int = 0  # on its way to disk, and nowhere else
    transient: int = 0  # reserved for the step that runs
    buffers: int = 0


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """State and totals of the engine, as of its last step."""

    running: tuple[SequenceStatistics, ...] = ()
    steps: int = 0
    # that steps took, each from the end of the one before where requests ran
    step_seconds: float = 0.0
    # the engine's clock, in seconds, after the last step, or when work came to an idle engine
    last_step_at: float = 0.0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prefill_tokens: int = 0  # prompt tokens really computed
    generation_tokens: int = 0
    batch_shapes: int = 0  # shapes of batches that were computed with so far
    preemptions: int = 0  # of running sequences, for lack of memory
    yields: int = 0  # of running sequences that gave their slots to others
    page_ins: int = 0  # states that were read back from disk
    memory: MemoryUse = MemoryUse()  # what model state takes
    cache: CacheStatistics = CacheStatistics()  # as of the end of the last sequence


def describe_request(sequence: Sequence, now: float) -> RequestStatistics:
    """Describe a queued request: its activity, and the seconds of each one so far."""
    times = sequence.times or Times(Activity.SLOT, now)
    needed, usable = times.needs or (None, None)
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
        cached_tokens=0 if sequence.started is None else sequence.started.cached,
        computed_tokens=sequence.num_computed_tokens,
        output_tokens=len(sequence.output),
    )
