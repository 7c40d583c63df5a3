"""Puts a loaded model, its cache and the engine together, within a budget of bytes."""

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
from ...cachestore.pool import MemoryPool
from ...cachestore.prefix_cache import PrefixCache
from ...cachestore.state import Layout
from ...models.backends import Limits
from ...models.kv.disk_format import DiskCodec
from ...models.load.loader import LoadedModel, LoadPhase
from ...models.runner import ModelRunner
from ...models.runtime import keep_freed_memory
from ...models.warmup import warm_up
from ...scheduler.engine import Engine, Publish
from ...scheduler.kv_cache_manager import KVCacheManager
from ...scheduler.limits import MemoryBound
from ...scheduler.memory import MemoryPlanner
from ...scheduler.queue import ConversationQueue
from ..config import Settings
from ..errors import StartError
from .measured_fit import context_length, prefill_chunk
from .memory_budget import MemoryBudget

_LEAST_SPAN = 64  # tokens of state that are published at once, at least
_FREED_SHARE = 16  # freed buffers that MLX keeps for reuse: a part of the budget, one in this many
_CLOSE_DISK = 5.0  # seconds to end what the disk tier began, where a start fails

Phase = LoadPhase | Literal["measuring", "warming up", "opening the disk tier"]
"""What start-up does."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Assembly:
    """What serves requests.

    Attributes:
        context_length: tokens of prompt and answer together: the model's, or fewer where the
            budget holds no more.
        bound: the budget, in the latter case.
        least_budget: bytes that state may take at least while the model is loaded.
        disk: where state outlives memory, if there is one.
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
        """Give all memory of state back. Belongs to the MLX thread; nothing may run."""
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
    """Measure the model, size its budget, and build what runs it. Belongs to the MLX thread.

    Args:
        loaded: the model.
        settings: of the daemon, and of the model.
        memory: of all models.
        queue: where sequences wait.
        publish: takes each step's events.
        wake: tells this thread, from any other, that the disk is done with something.
        measured: where what is measured of models is kept, so that the same settings give the
            same context at every start.
        begin: told what is done next.
        folders: for state on disk; None keeps none there.
        go_on: called before each call of the model until it is served; what it raises ends the
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
    chunk = prefill_chunk(settings, runner, budget)
    if settings.exact:
        runner.profile.least_chunk = chunk
    context, bound = context_length(loaded, runner, budget)
    copied = max_copy_bytes(budget)
    runner.live_within(budget, max_batch=settings.max_batch)
    cache = _cache(
        loaded,
        settings,
        memory.pool,
        grid=chunk if settings.exact else 1,
        longest=max(_LEAST_SPAN, copied // max(1, runner.profile.sizes.token)),
    )
    with ExitStack() as undo:  # what a start that fails leaves to others, or nobody
        undo.callback(cache.close)
        _warm_up(settings, runner, memory.warm_up_bytes(budget), chunk, begin, go_on)
        disk, pager = _open_disk(folders, loaded, copied, wake, begin), None
        if folders is not None and disk is not None:
            undo.callback(folders.give_back, disk.folder)
            undo.callback(disk.close, _CLOSE_DISK)
            pager = _pager(runner, cache, disk, folders)
        engine = Engine(
            runner,
            _kv_cache(settings, runner, cache, pager),
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
    """For how long a prompt's call may keep streams waiting, in seconds."""
    asked = settings.max_stall_ms
    return limits.max_stall if asked is None else asked / 1000


def open_folders(settings: Settings, names: Collection[str]) -> ModelFolders | None:
    """Claim the folder for state on disk, before any model is loaded in vain.

    Args:
        settings: of the daemon.
        names: of the configured models.

    Returns:
        The models' folders; None where no state is kept on disk, or none can be.

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
        log.warning("no state on disk", reason=str(error))
        return None


def _kv_cache(
    settings: Settings,
    runner: ModelRunner,
    cache: PrefixCache,
    pager: Pager | None,
) -> KVCacheManager:
    return KVCacheManager(
        runner,
        cache,
        interval=settings.checkpoint_interval,
        keeps=not settings.no_cache,
        longest=cache.longest,
        may_capture=lambda tokens: cache.pool.make_room(Size(*runner.profile.captured(tokens))),
        may_store=lambda tokens: cache.pool.make_room(Size(runner.profile.kept(tokens))),
        pager=pager,
    )


def _cache(
    loaded: LoadedModel, settings: Settings, pool: MemoryPool, *, grid: int, longest: int
) -> PrefixCache:
    layout = loaded.layout
    return PrefixCache(
        Layout(spans=layout.has_spans, checkpoints=layout.has_checkpoints),
        budget=pool.budget.nbytes,
        checkpoints_kept=settings.checkpoints_kept,
        grid=grid,
        longest=longest,
        pool=pool,
    )


def _warm_up(
    settings: Settings,
    runner: ModelRunner,
    budget: int,
    chunk: int,
    begin: Callable[[Phase], object],
    go_on: Callable[[], object],
) -> None:
    """Compile the kernels of as many rows as there is memory for."""
    if settings.warmup == "quick" and runner.limits.warms_up:
        begin("warming up")
        warm_up(runner, settings.max_batch, nbytes=budget, chunk=chunk, go_on=go_on)


def _pager(runner: ModelRunner, cache: PrefixCache, disk: DiskTier, folders: ModelFolders) -> Pager:
    return Pager(
        cache,
        disk,
        DiskCodec(host_reads=runner.limits.host_reads, form=runner.state_form()),
        budget=folders.budget,
        folders=folders,
    )


def _open_disk(
    folders: ModelFolders | None,
    loaded: LoadedModel,
    queue_bytes: int,
    wake: Callable[[], None],
    begin: Callable[[Phase], object],
) -> DiskTier | None:
    """Open the disk tier. A disk that cannot be used is a pity, another daemon's an error."""
    if folders is None:
        return None
    begin("opening the disk tier")
    try:
        folder = folders.take(loaded.name, loaded.fingerprint)
    except DiskTierError as error:
        log.warning("no state on disk", reason=str(error))
        return None
    try:
        return DiskTier(folder, fingerprint=loaded.fingerprint, queue_bytes=queue_bytes, wake=wake)
    except BaseException as error:
        folders.give_back(folder)
        if isinstance(error, FolderInUseError):
            raise _in_use(error) from error
        if not isinstance(error, DiskTierError):
            raise
        log.warning("no state on disk", reason=str(error))
        return None


def _in_use(error: FolderInUseError) -> StartError:
    return StartError(f"{error} with --disk-dir, or start it with --no-disk")
