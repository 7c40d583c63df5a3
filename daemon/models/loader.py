"""Loads models beside serving ones, unloads them, and shares the configured prompts."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import Any, TypeVar

import structlog

from ...cachestore.disk.model_folders import ModelFolders
from ...cachestore.tries import SHARED
from ...models.backends import limits_of
from ...models.load.loader import OpenedModel, find
from ...models.load.probe import failures_in_words
from ...models.load.watch import Progress, Watch
from ...models.params import KVQuantization
from ...models.runtime import BLAS, device_memory, device_name, give_freed_memory_back
from ...scheduler.errors import RequestError, UnavailableError
from ...scheduler.handoff import Handoff
from ...scheduler.limits import RETRY_AFTER
from ...scheduler.queue import ConversationQueue
from ...scheduler.thread import MLXThread
from ..config import Settings
from ..errors import StartError
from ..http.bodies import BodyBudget, Share
from ..identity.caller import Caller
from ..identity.tenants import TenantTerms
from ..observability.cache_admin import CacheAdmin, PinRequest
from ..quoting import quote
from ..requests.arrivals import Arrivals, Wait
from ..requests.service import Service
from ..requests.workers import Workers
from .assembly import Assembly, Phase, assemble, max_stall, save_state
from .memory_budget import MemoryBudget
from .pressure import PressureWatch
from .slot import ModelSlot, Resident

_CHANNEL_LIMIT = 4096  # events that may wait for one slow client
_POLL = 0.01  # seconds between two looks for room
_FILE_PIN = "file:"  # begins the names of configured prompts' pins

T = TypeVar("T")

log = structlog.get_logger()


class ModelLoader:
    """Loads a model on the MLX thread, between the steps of other models' engines.

    Files are found and downloaded on another thread, and weights are read piece by piece. A call
    that cannot be cut, such as measuring a new model, is logged if it held other models up.

    Attributes:
        memory: of all models.
        stop: once it is set, a download ends, and a load ends between two phases or two calls of
            the model.

    Args:
        thread: of MLX.
        settings: returns the settings in force.
        workers: read prompts.
        pressure: of the system's memory.
        tenants: their bounds.
        folders: of state on disk; None keeps none there.
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
        """Find a model, download it if need be, and return the bytes of its weights.

        Raises:
            ModelError: there is none, or it cannot be loaded.
        """
        log.info("loading", model=slot.source, backend=device_name(), blas=BLAS.name)
        watch = Watch(downloaded, self.stop, self._settings().download_timeout)
        source = await _in_background(lambda: find(slot.source, begin, watch))
        begin("loading")
        settings, quantization = self._settings(), None
        if settings.kv_bits is not None:
            quantization = KVQuantization(settings.kv_bits, settings.kv_group_size)
        opened = await self._on_thread(slot, OpenedModel, source, quantization, settings.backend)
        self._opened[slot.name] = opened
        await _in_background(opened.try_template)
        return opened.weight_bytes

    def fits(self, weights: int, beside: list[int]) -> bool:
        """Return True if weights have room beside loaded ones and the share of state."""
        return self.memory.fits(weights, beside)

    async def load(self, slot: ModelSlot, begin: Callable[[Phase], object]) -> Resident:
        """Read the weights of an opened model, and assemble it.

        Raises:
            ModelError: it cannot be loaded.
            StartError: memory holds no request of it, or a shared prompt cannot be read.
        """
        opened = self._opened[slot.name]
        prompts = read_prompts(self._settings().shared_prompts)
        await self._take_room(slot, opened.weight_bytes)
        while await self._on_thread(slot, opened.read_more):
            pass
        resident = await self._build(slot, opened, begin)
        try:
            await self._serve(slot, resident, prompts)
        except BaseException as error:  # also where the daemon stops
            clear_frames(error.__traceback__)  # they refer to the assembly
            assemblies = [resident.assembly]
            del resident
            await self._close(slot, assemblies)
            raise
        self._opened.pop(slot.name)
        slot.weight_bytes = opened.weight_bytes
        return resident

    async def _serve(self, slot: ModelSlot, resident: Resident, prompts: dict[str, str]) -> None:
        """Let a model's engine step, and pin the shared prompts."""
        await self._on_thread(slot, self.memory.built)
        engine = resident.assembly.engine
        self._thread.attach(engine.step)
        slot.context_length = resident.service.context_length
        await share_prompts(resident.service, prompts)

    async def _take_room(self, slot: ModelSlot, weights: int) -> None:
        """Take the room of the weights from state, before they are read.

        Running requests free it at the next step; the state of one request always fits.
        """
        await self._on_thread(slot, self.memory.enter, slot.name, weights)
        async with asyncio.timeout(self._settings().request_timeout):
            while not await self._on_thread(slot, self.memory.has_room):
                self._thread.wake()
                await asyncio.sleep(_POLL)

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
        self._go_on()
        begin(phase)

    def _go_on(self) -> None:
        """Fail the load if the daemon stops."""
        if self.stop.is_set():
            raise UnavailableError("the daemon is stopping", retry_after=RETRY_AFTER)

    async def drop(self, slot: ModelSlot) -> None:
        """Release an opened model, or the rest of a failed load."""
        self._opened.pop(slot.name, None)
        await self._on_thread(slot, self._forget, slot.name)

    async def unload(self, slot: ModelSlot) -> None:
        """Save a model's state, and free all its memory. No request may use it."""
        if slot.resident is None:
            return
        assemblies = [slot.resident.assembly]
        slot.rest()
        await self._close(slot, assemblies)
        log.info("unloaded", model=slot.name)

    async def _close(self, slot: ModelSlot, assemblies: list[Assembly]) -> None:
        """Save the state of a list's one assembly, and close all its parts, whatever they raise.

        It is taken out of the list, so that its arrays are freed on the MLX thread.
        """
        disk = assemblies[0].disk
        async with AsyncExitStack() as parts:  # the last one first
            parts.push_async_callback(self._on_thread, slot, self._forget, slot.name)
            if self._folders is not None and disk is not None:  # or its bytes count twice
                give_back = self._folders.give_back
                parts.push_async_callback(asyncio.to_thread, give_back, disk.folder)
            parts.push_async_callback(self._on_thread, slot, self._close_last, assemblies)
            await self._on_thread(slot, lambda: None)  # engines step before it: cancelled rows end
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
        """Bound the tenants' use and state by the settings in force."""
        tenants = self._tenants
        tenants.use.terms_changed()
        self._thread.submit(self.memory.pool.bound_tenants, tenants.bounds, tenants.floors)

    async def _on_thread(self, slot: ModelSlot, fn: Callable[..., T], *args: Any) -> T:
        return await asyncio.wrap_future(self._thread.submit(self._timed, slot, fn, *args))

    def _timed(self, slot: ModelSlot, fn: Callable[..., T], *args: Any) -> T:
        """Do a piece of work; log it if streams of other models waited long for it."""
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


def shrink(memory: MemoryBudget, share: float) -> None:
    """Use a share of the budget, as the system's memory allows. Belongs to the MLX thread."""
    memory.pool.shrink(share)
    give_freed_memory_back()


async def _in_background(fn: Callable[[], T]) -> T:
    """Call a function that may not return, on a thread that does not delay the process's end."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # or a result after a cancellation is an error

    def call() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:  # noqa: BLE001  (it belongs to the caller)
            future.set_exception(error)

    threading.Thread(target=call, name="umbel-find", daemon=True).start()
    return await asyncio.wrap_future(future)


def read_prompts(paths: Iterable[str]) -> dict[str, str]:
    """Read the files of prompts that the configuration shares, without final line ends.

    Returns:
        Texts by the names of their pins.

    Raises:
        StartError: a file cannot be read, has no text, or two have one name.
    """
    found: dict[str, str] = {}
    for each in paths:
        path = Path(each).expanduser()
        try:
            text = path.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"shared_prompts: cannot read {quote(each)}: {error}") from error
        if not text:
            raise StartError(f"shared_prompts: {quote(each)} is empty")
        if _FILE_PIN + path.name in found:
            raise StartError(f"shared_prompts: two files are called {quote(path.name)}")
        found[_FILE_PIN + path.name] = text
    return found


async def share_prompts(service: Service, prompts: dict[str, str]) -> None:
    """Pin prompts for all tenants, and unpin those of a former configuration.

    Failures are logged: the model serves without the prompt.

    Args:
        service: of a loaded model.
        prompts: of `read_prompts`.
    """
    try:
        for pin in await service.cache.pins(SHARED):
            if pin.name.startswith(_FILE_PIN) and pin.name not in prompts:
                await service.cache.unpin(SHARED, pin.name)
                log.info("prompt not shared any more", name=pin.name)
    except RequestError as error:
        log.warning("prompts of a former start may still be shared", reason=str(error))
    for number, (name, text) in enumerate(prompts.items()):
        request = PinRequest(name=name, system=text, shared=True)
        caller, share = Caller(SHARED, operator=True), Share(BodyBudget(1 << 40))
        arrival = Arrivals().arrive(f"shared-{number}", caller, share, Wait(time.monotonic()))
        try:
            pin = await service.pin(request, arrival)
        except Exception as error:  # noqa: BLE001  (the model serves without it)
            log.warning("prompt not shared", name=name, reason=str(error))
        else:
            log.info("prompt shared", name=name, tokens=pin.held)
