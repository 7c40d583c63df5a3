"""How long a context and its prefill chunks may be within a budget, as a model was measured.

`model_fit.py` estimates the same without the model.
"""

import structlog

from ...cachestore.ledger import max_copy_bytes
from ...models.load.loader import LoadedModel
from ...models.memory_profile import PlannedChunk
from ...models.runner import ModelRunner
from ...scheduler.limits import MemoryBound
from ..config import Settings
from ..errors import StartError
from .fit import LEAST_CONTEXT, usable

_LEAST_CHUNK = 512  # tokens; and those of exact serving, which shares whole chunks only
_CHUNK_SHARE = 4  # of the budget, a part in this many is what a longer chunk may compute with

log = structlog.get_logger()


def prefill_chunk(settings: Settings, runner: ModelRunner, budget: int) -> int:
    """Find how many tokens of a prompt are computed at once, at most.

    What a long chunk computes with is no room for what is cached.
    """
    if settings.prefill_chunk is not None:
        return settings.prefill_chunk
    chunk = _LEAST_CHUNK if settings.exact else runner.limits.prefill_chunk
    while chunk > _LEAST_CHUNK:
        taken = runner.profile.prefill(PlannedChunk(chunk, chunk, 0)).nbytes
        if taken * _CHUNK_SHARE <= budget:
            break
        chunk //= 2
    return chunk


def context_length(
    loaded: LoadedModel, runner: ModelRunner, budget: int
) -> tuple[int, MemoryBound | None]:
    """Say how many tokens the context has, and what cuts it: None where it is the model's own.

    Raises:
        StartError: the budget holds no request of this model.
    """
    most = usable(budget)
    fits = runner.profile.longest_context(most)
    least = min(LEAST_CONTEXT, loaded.context_length)
    if fits < least:
        needed = runner.profile.worst_case(least).nbytes
        needed += max_copy_bytes(needed) * 2
        raise StartError(
            f"setting cache_bytes: {budget} bytes hold no request of this model; "
            f"it takes {needed} ({-(-needed // 2**20)}MiB) to serve {least} tokens"
        )
    if fits >= loaded.context_length:
        return loaded.context_length, None
    log.warning("context cut to what fits", tokens=fits, model=loaded.context_length)
    return fits, MemoryBound(most, lambda tokens: runner.profile.worst_case(tokens).nbytes)
