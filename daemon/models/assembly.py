"""Assembles a loaded model, its cache and the engine, within a budget of bytes."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from ...cachestore.disk.model_folders import ModelFolders
from ...cachestore.disk.tier import DiskTier
from ...cachestore.errors import DiskTierError, FolderInUseError
from ...cachestore.ledger import Size, max_copy_bytes
from ...cachestore.paging.pager import Pager
from ...cachestore.prefix_cache import PrefixCache
from ...cachestore.state import Layout
from ...models.backends import Limits
from ...models.kv.disk_format import DiskCodec
from ...models.load.loader import LoadedModel, LoadPhase
from ...models.memory_profile import PlannedChunk
from ...models.runner import ModelRunner
from ...models.runtime import keep_freed_memory
from ...models.warmup import warm_up
from ...scheduler.engine import Engine, Publish
from ...scheduler.kv_cache_manager import KVCacheManager
from ...scheduler.limits import MemoryBound
from ...scheduler.memory import MemoryPlanner
from ...scheduler.queue import ConversationQueue
from ...scheduler.thread import MLXThread
from ..config import Settings
from ..errors import StartError
from .fit import LEAST_CONTEXT, request_budget
from .memory_budget import MemoryBudget

_LEAST_SPAN = 64  # tokens of state that are published at once, at least
_LEAST_CHUNK = 512  # tokens; also the chunk of exact serving, which shares whole chunks only
_CHUNK_SHARE = 4  # a longer chunk may compute with one part in this many of the budget
_FREED_SHARE = 16  # MLX keeps freed buffers for reuse: one part in this many of the budget
_CLOSE_DISK = 5.0  # seconds to finish the disk tier's work when a start fails
_SAVE_GRACE = 10.0  # seconds; state that is not written by then is computed again

Phase = LoadPhase | Literal["measuring", "warming up", "opening the disk tier"]
"""A phase of start-up."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Assembly:
    """A model that serves requests.

    Attributes:
        context_length: tokens of prompt and answer together: the model's, or fewer if the budget
            holds no more.
        bound: the budget, in the latter case.
        least_budget: least bytes of state while the model is loaded.
        disk: keeps state that leaves memory, if there is a disk tier.
        pager: moves it there and back.
    """

    engine: Engine
    runner: ModelRunner
    cache: PrefixCache
    context_length: int
    bound: MemoryBound | None
    least_budget: int
    disk: DiskTier | None
    pager: Pager | None

    def close(self) -> None:
        """Free all memory of state. Belongs to the MLX thread; no request may run."""
        with ExitStack() as parts:  # the last one first, each whatever the others raise
            parts.callback(self.cache.close)
            parts.callback(self.engine.close)


def assemble(
    loaded: LoadedModel,
    settings: Settings,
    memory: MemoryBudget,
    queue: ConversationQueue,
    publish: Publish,
    wake: Callable[[], None],
    measured: Path | None = None,
    begin: Callable[[Phase], object] = lambda _: None,
    *,
    folders: ModelFolders | None = None,
    go_on: Callable[[], object] = lambda: None,
) -> Assembly:
    """Measure the model, size its budget, and build its engine. Belongs to the MLX thread.

    Args:
        loaded: the model.
        settings: of the daemon, and of the model.
        memory: of all models.
        queue: of waiting sequences.
        publish: takes each step's events.
        wake: wakes this thread, from any other, after work of the disk.
        measured: folder of measurements, so that the same settings give the same context at every
            start.
        begin: called with each phase.
        folders: of state on disk; None keeps none there.
        go_on: called before each call of the model until it is served; its exception ends the
            start.

    Raises:
        StartError: the budget, or the device, holds no request of this model; or another
            daemon uses the folder of the disk tier.
    """
    begin("measuring")
    runner = ModelRunner(loaded, exact=settings.exact, measured=measured, go_on=go_on)
    if runner.one_by_one is not None:
        log.warning("decoding one by one", model=loaded.name, reason=runner.one_by_one)
    weights = max(loaded.weight_bytes, runner.resident - memory.held)
    budget = memory.enter(loaded.name, weights)
    keep_freed_memory(min(budget // _FREED_SHARE, runner.limits.freed_bytes))
    chunk = _prefill_chunk(settings, runner, budget)
    if settings.exact:
        runner.profile.least_chunk = chunk
    context, bound = _context(loaded, runner, budget)
    copied = max_copy_bytes(budget)
    runner.live_within(budget, max_batch=settings.max_batch)
    cache = PrefixCache(
        Layout(spans=loaded.layout.has_spans, checkpoints=loaded.layout.has_checkpoints),
        budget=memory.pool.budget.nbytes,
        checkpoints_kept=settings.checkpoints_kept,
        grid=chunk if settings.exact else 1,
        longest=max(_LEAST_SPAN, copied // max(1, runner.profile.sizes.token)),
        pool=memory.pool,
    )
    with ExitStack() as undo:  # of a start that fails
        undo.callback(cache.close)
        if settings.warmup == "quick" and runner.limits.warms_up:
            begin("warming up")
            nbytes = memory.warm_up_bytes(budget)
            warm_up(runner, settings.max_batch, nbytes=nbytes, chunk=chunk, go_on=go_on)
        disk, pager = _open_disk(folders, loaded, copied, wake, begin), None
        if folders is not None and disk is not None:
            undo.callback(folders.give_back, disk.folder)
            undo.callback(disk.close, _CLOSE_DISK)
            pager = Pager(
                cache,
                disk,
                DiskCodec(host_reads=runner.limits.host_reads, form=runner.state_form()),
                budget=folders.budget,
                folders=folders,
            )
        kv_cache = KVCacheManager(
            runner,
            cache,
            interval=settings.checkpoint_interval,
            keeps=not settings.no_cache,
            longest=cache.longest,
            may_capture=lambda tokens: cache.pool.make_room(Size(*runner.profile.captured(tokens))),
            may_store=lambda tokens: cache.pool.make_room(Size(runner.profile.kept(tokens))),
            pager=pager,
        )
        engine = Engine(
            runner,
            kv_cache,
            MemoryPlanner(memory.pool, runner),
            queue,
            publish,
            eos_ids=loaded.text.eos_ids,
            prefill_chunk=chunk,
            max_batch=settings.max_batch,
            max_stall=max_stall(settings, runner.limits),
            exact=settings.exact,
            token_bytes=weights,
        )
        undo.pop_all()
    return Assembly(engine, runner, cache, context, bound, budget, disk, pager)


def max_stall(settings: Settings, limits: Limits) -> float:
    """Return the bound on a prefill call's stall of streams, in seconds."""
    asked = settings.max_stall_ms
    return limits.max_stall if asked is None else asked / 1000


def _prefill_chunk(settings: Settings, runner: ModelRunner, budget: int) -> int:
    """Choose the most tokens of a prompt in one call: a longer chunk leaves less for the cache."""
    if settings.prefill_chunk is not None:
        return settings.prefill_chunk
    chunk = _LEAST_CHUNK if settings.exact else runner.limits.prefill_chunk
    while chunk > _LEAST_CHUNK:
        taken = runner.profile.prefill(PlannedChunk(chunk, chunk, 0)).nbytes
        if taken * _CHUNK_SHARE <= budget:
            break
        chunk //= 2
    return chunk


def _context(
    loaded: LoadedModel, runner: ModelRunner, budget: int
) -> tuple[int, MemoryBound | None]:
    """Return the context in tokens, and the bound that cuts it; None if it is the model's own."""
    most = request_budget(budget)
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


def open_folders(settings: Settings, names: Collection[str]) -> ModelFolders | None:
    """Claim the folder of state on disk, before any model is loaded.

    Args:
        settings: of the daemon.
        names: of the configured models.

    Returns:
        The models' folders; None if no state is kept on disk, or the folder cannot be used.

    Raises:
        StartError: another daemon uses the folder.
    """
    if settings.disk_folder is None:
        return None
    try:
        return ModelFolders(settings.disk_folder, names, settings.disk_budget)
    except FolderInUseError as error:
        raise _in_use(error) from error
    except DiskTierError as error:
        log.warning("disk tier disabled", reason=str(error))
        return None


def _open_disk(
    folders: ModelFolders | None,
    loaded: LoadedModel,
    queue_bytes: int,
    wake: Callable[[], None],
    begin: Callable[[Phase], object],
) -> DiskTier | None:
    """Open the disk tier; None if the disk cannot be used. Another daemon's use is an error."""
    if folders is None:
        return None
    begin("opening the disk tier")
    try:
        folder = folders.take(loaded.name, loaded.fingerprint)
        with ExitStack() as undo:
            undo.callback(folders.give_back, folder)
            tier = DiskTier(
                folder, fingerprint=loaded.fingerprint, queue_bytes=queue_bytes, wake=wake
            )
            undo.pop_all()
            return tier
    except FolderInUseError as error:
        raise _in_use(error) from error
    except DiskTierError as error:
        log.warning("disk tier disabled", reason=str(error))
        return None


def _in_use(error: FolderInUseError) -> StartError:
    return StartError(f"{error} with --disk-dir, or start it with --no-disk")


async def save_state(thread: MLXThread, assembly: Assembly) -> None:
    """Write state that is not on disk yet, within the grace, and close the disk tier."""
    pager, disk = assembly.pager, assembly.disk
    if pager is None or disk is None:
        return
    try:
        async with asyncio.timeout(_SAVE_GRACE):
            while await asyncio.wrap_future(thread.submit(pager.write_all)):
                await asyncio.to_thread(disk.flush, _SAVE_GRACE)
    except TimeoutError:
        log.warning("state not saved in time", seconds=_SAVE_GRACE)
    except Exception:
        log.exception("state not saved")
    await asyncio.to_thread(disk.close, _SAVE_GRACE)
