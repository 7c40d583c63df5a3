"""Loads models beside those that serve, and gives back all that they held."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from traceback import clear_frames
from typing import Any, TypeVar

import structlog

from ...cachestore.disk.model_folders import ModelFolders
from ...models.backends import limits_of
from ...models.load.loader import OpenedModel, Source, find
from ...models.load.probe import failures_in_words
from ...models.load.watch import Progress, Watch
from ...models.params import KVQuantization
from ...models.runtime import BLAS, device_memory, device_name, give_freed_memory_back
from ...scheduler.errors import UnavailableError
from ...scheduler.handoff import Handoff
from ...scheduler.limits import RETRY_AFTER
from ...scheduler.queue import ConversationQueue
from ...scheduler.thread import MLXThread
from ..config import Settings
from ..errors import StartError
from ..identity.tenants import TenantTerms
from ..lifecycle.state_saving import save_state
from ..observability.cache_admin import CacheAdmin
from ..requests.service import Service
from ..requests.workers import Workers
from .assembly import Assembly, Phase, assemble, max_stall
from .memory_budget import MemoryBudget
from .pressure import PressureWatch
from .shared_files import declare, read
from .slot import ModelSlot, Resident

_CHANNEL_LIMIT = 4096  # events that may wait for one slow client
_LOOK_AGAIN = 0.01  # seconds until it is seen whether there is room

T = TypeVar("T")

log = structlog.get_logger()


class ModelLoader:
    """Builds what serves a model, on the MLX thread, between the steps of others.

    Files are found and downloaded elsewhere, and weights are read piece by piece. What cannot be
    cut, as to measure a model that was never here, is logged where it held up others.

    Attributes:
        memory: of all models.
        stop: once it is set, ends a download that is under way, and a load between two phases or
            two calls of the model.

    Args:
        thread: the one of MLX.
        settings: those in force.
        workers: read prompts.
        pressure: of the system's memory.
        tenants: what holds for them.
        folders: for state on disk; None keeps none there.
    """

    def __init__(
        self,
        thread: MLXThread,
        settings: Callable[[], Settings],
        workers: Workers,
        pressure: PressureWatch,
        tenants: TenantTerms,
        folders: ModelFolders | None,
    ) -> None:
        self._thread = thread
        self._settings = settings
        self._folders = folders
        self._workers = workers
        self._pressure = pressure
        self._tenants = tenants
        self.memory = MemoryBudget(settings(), device_memory())
        self.memory.pool.bound_tenants(tenants.bounds, tenants.floors)
        self._queues: dict[str, ConversationQueue] = {}
        self.stop = threading.Event()
        self._opened: dict[str, OpenedModel] = {}

    async def open(
        self,
        slot: ModelSlot,
        begin: Callable[[Phase], object],
        downloaded: Callable[[Progress], object],
    ) -> int:
        """Find a model, download it if need be, and say what its weights take, in bytes.

        Raises:
            ModelError: there is none, or it cannot be loaded.
        """
        log.info("loading", model=slot.source, backend=device_name(), blas=BLAS.name)
        watch = Watch(downloaded, self.stop, self._settings().download_timeout)
        source = await _in_background(lambda: find(slot.source, begin, watch))
        begin("loading")
        opened = await self._on_thread(slot, self._open, source)
        self._opened[slot.name] = opened
        await _in_background(opened.try_template)
        return opened.weight_bytes

    def _open(self, source: Source) -> OpenedModel:
        settings, quantization = self._settings(), None
        if settings.kv_bits is not None:
            quantization = KVQuantization(settings.kv_bits, settings.kv_group_size)
        return OpenedModel(source, quantization, settings.backend)

    def fits(self, weights: int, beside: list[int]) -> bool:
        """Whether weights have room beside those of others, with the share of state."""
        return self.memory.fits(weights, beside)

    async def load(self, slot: ModelSlot, begin: Callable[[Phase], object]) -> Resident:
        """Read the weights of what was opened, and build what serves it.

        Raises:
            ModelError: it cannot be loaded.
            StartError: memory holds no request of it, or a shared prompt cannot be read.
        """
        opened, prompts = self._opened[slot.name], read(self._settings().shared_prompts)
        await self._take_room(slot, opened.weight_bytes)
        while await self._on_thread(slot, opened.read_more):
            pass
        resident = await self._build(slot, opened, begin)
        try:
            await self._serve(slot, resident, prompts)
        except BaseException as error:  # also where the daemon stops
            clear_frames(error.__traceback__)  # they hold what is closed now
            assemblies = [resident.assembly]
            del resident
            await self._close(slot, assemblies)
            raise
        self._opened.pop(slot.name)
        slot.weight_bytes = opened.weight_bytes
        return resident

    async def _serve(self, slot: ModelSlot, resident: Resident, prompts: dict[str, str]) -> None:
        """Let a model compute, and have it begin with the prompts that are shared."""
        await self._on_thread(slot, self.memory.built)
        engine = resident.assembly.engine
        self._thread.attach(engine.step)
        slot.context_length = resident.service.context_length
        await declare(resident.service, prompts)

    async def _take_room(self, slot: ModelSlot, weights: int) -> None:
        """Take the room that weights need from state, before they are read.

        Who runs gives it up at the next step; what must stay for one request fits always.
        """
        await self._on_thread(slot, self.memory.enter, slot.name, weights)
        async with asyncio.timeout(self._settings().request_timeout):
            while not await self._on_thread(slot, self.memory.has_room):
                self._thread.wake()
                await asyncio.sleep(_LOOK_AGAIN)

    async def _build(
        self, slot: ModelSlot, opened: OpenedModel, begin: Callable[[Phase], object]
    ) -> Resident:
        settings = self._settings()
        wake = self._thread.wake
        queue = ConversationQueue(settings.max_waiting, self._tenants.use, wake=wake)
        self._queues[slot.name] = queue
        handoff = Handoff(queue, wake, channel_limit=_CHANNEL_LIMIT)

        def build() -> tuple[Any, Assembly]:
            with failures_in_words(slot.name, StartError, UnavailableError):
                loaded = opened.finish()
                context = min(loaded.context_length, slot.settings.context or loaded.context_length)
                named = replace(loaded, name=slot.name, context_length=context)
                return named, assemble(
                    named,
                    settings,
                    self.memory,
                    queue,
                    handoff.publish,
                    wake,
                    settings.measured_folder,
                    partial(self._begin, begin),
                    folders=self._folders,
                    go_on=self._go_on,
                )

        loaded, assembly = await self._on_thread(slot, build)
        service = Service(
            loaded,
            assembly,
            queue,
            handoff,
            CacheAdmin(
                self._thread,
                assembly.cache,
                lambda token: loaded.text.read_token(token, first=False).data or b"",
            ),
            self._pressure,
            self._workers,
            slot.metrics,
            exact=settings.exact,
            request_timeout=settings.request_timeout,
        )
        return Resident(service, assembly, handoff)

    def _begin(self, begin: Callable[[Phase], object], phase: Phase) -> None:
        """Begin the next phase, unless the daemon stops."""
        self._go_on()
        begin(phase)

    def _go_on(self) -> None:
        """End a load with an error if the daemon stops."""
        if self.stop.is_set():
            raise UnavailableError("the daemon is stopping", retry_after=RETRY_AFTER)

    async def drop(self, slot: ModelSlot) -> None:
        """Let go of what was opened, or of what is left of a load that failed."""
        self._opened.pop(slot.name, None)
        await self._on_thread(slot, self._forget, slot.name)

    async def unload(self, slot: ModelSlot) -> None:
        """Save a model's state, and give all its memory back. No request may use it."""
        if slot.resident is None:
            return
        assemblies = [slot.resident.assembly]
        slot.rest()
        await self._close(slot, assemblies)
        log.info("unloaded", model=slot.name)

    async def _close(self, slot: ModelSlot, assemblies: list[Assembly]) -> None:
        """Save the state of the only one there is, and close it, each part whatever others raise.

        It is taken out of the list, so that its arrays go on the MLX thread.
        """
        disk = assemblies[0].disk
        async with AsyncExitStack() as parts:  # the last one first
            parts.push_async_callback(self._on_thread, slot, self._forget, slot.name)
            if self._folders is not None and disk is not None:  # its bytes would count twice
                give_back = self._folders.give_back
                parts.push_async_callback(asyncio.to_thread, give_back, disk.folder)
            parts.push_async_callback(self._on_thread, slot, self._close_last, assemblies)
            await self._on_thread(slot, _take_turns)
            await save_state(self._thread, assemblies[0])

    def _close_last(self, assemblies: list[Assembly]) -> None:
        assembly = assemblies.pop()
        self._thread.detach(assembly.engine.step)
        assembly.close()

    def _forget(self, name: str) -> None:
        self.memory.leave(name)
        if (queue := self._queues.pop(name, None)) is not None:
            queue.leave()
        gc.collect()  # mlx-lm's modules refer to each other
        give_freed_memory_back()

    def bound_tenants(self) -> None:
        """Bound what tenants use, and what their state takes, as the settings say now."""
        tenants = self._tenants
        tenants.use.terms_changed()
        self._thread.submit(self.memory.pool.bound_tenants, tenants.bounds, tenants.floors)

    async def _on_thread(self, slot: ModelSlot, fn: Callable[..., T], *args: Any) -> T:
        return await asyncio.wrap_future(self._thread.submit(self._timed, slot, fn, *args))

    def _timed(self, slot: ModelSlot, fn: Callable[..., T], *args: Any) -> T:
        """Do a piece of work; say so where it kept streams of other models waiting for long."""
        waits, begun = bool(self.memory.pool.busy), time.monotonic()
        try:
            return fn(*args)
        finally:
            taken = time.monotonic() - begun
            settings = self._settings()
            if waits and taken > max_stall(settings, limits_of(settings.backend)):
                log.warning(
                    "streams of other models waited",
                    loading=slot.name,
                    phase=slot.phase,
                    seconds=round(taken, 3),
                )


def _take_turns() -> None:
    """Do nothing on the MLX thread, after which engines step: what was cancelled ends."""


def shrink(memory: MemoryBudget, share: float) -> None:
    """Use only a share of the budget, because the system is short of memory. MLX thread."""
    memory.pool.shrink(share)
    give_freed_memory_back()


async def _in_background(fn: Callable[[], T]) -> T:
    """Call what may take for ever, on a thread that keeps no process from ending."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # or a result that nobody waits for would be an error

    def call() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:  # noqa: BLE001  (it belongs to who waits)
            future.set_exception(error)

    threading.Thread(target=call, name="umbel-find", daemon=True).start()
    return await asyncio.wrap_future(future)
