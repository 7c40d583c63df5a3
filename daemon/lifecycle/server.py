"""A daemon's life: start-up, main loop, shutdown, in this order."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import structlog
import uvloop

from ...models import KERNELS
from ...models.errors import ModelError
from ...models.load import open_files  # noqa: F401  (the first import of mlx-lm)
from ...models.runtime import BLAS, release_thread
from ...scheduler.errors import UnavailableError
from ...scheduler.thread import MLXThread
from ..config import Settings
from ..errors import StartError
from ..http.connections import Connections
from ..http.handlers.entry import Entry
from ..http.server import HTTPServer
from ..http.sockets import UnixListener
from ..identity.tenants import TenantTerms
from ..models.assembly import Assembly, open_folders, save_state
from ..models.loader import ModelLoader, shrink
from ..models.pool import ModelPool
from ..models.pressure import PressureWatch, find_source
from ..models.slot import ModelSlot, Resident, slots_of
from ..requests.workers import Workers
from ..responses.desk import ResponseDesk
from ..responses.store import ResponseStore
from .display import Display, Served
from .reload import Reloader, most_connections, raise_limit, warn_of_unknown_models
from .service_manager import (
    InheritedListener,
    ServiceManager,
    StartUp,
    end_when_stalled,
    inherited,
)
from .signals import StopSignals

_SWITCH = 5e-4
"""Seconds until a thread yields the interpreter to a waiting one, a tenth of the default: the MLX
thread releases it in each comparison of arrays and each evaluation, and all streams wait until that
thread has it again."""

_THREAD_STOP = 60.0
_LOAD_STOP = 10.0  # seconds for the computation of a load that is under way
_LOAD_ENDS = f"waiting for the load to end, for {_LOAD_STOP:.0f} s at most"

log = structlog.get_logger()


def serve(
    settings: Settings,
    *,
    temporary: bool = False,
    read_again: Callable[[], Settings] | None = None,
    display: Display | None = None,
) -> None:
    """Run a daemon until SIGTERM, SIGINT or SIGHUP; later signals are ignored.

    Args:
        settings: of the daemon.
        temporary: it leaves nothing behind, not even the folder of its socket.
        read_again: reads the settings on SIGHUP, which then stops nothing.
        display: shows the daemon's progress to a user.

    Raises:
        StartError: it cannot start; the message says why.
    """
    gc.freeze()  # imported objects stay: each collection would look through all of them
    sys.setswitchinterval(_SWITCH)
    manager = ServiceManager.of(os.environ)
    with (
        closing(display or Display()) as shown,
        StopSignals() as signals,
        closing(
            inherited(os.environ) or UnixListener(settings.socket_path, temporary=temporary)
        ) as listener,
    ):
        uvloop.run(Daemon(settings, listener, signals, manager, read_again, shown).run())


class Daemon:
    """Owns the MLX thread, the HTTP server and everything between them."""

    def __init__(
        self,
        settings: Settings,
        listener: UnixListener | InheritedListener,
        signals: StopSignals,
        manager: ServiceManager,
        read_again: Callable[[], Settings] | None,
        display: Display,
    ) -> None:
        self._display = display
        self._listener = listener
        self._signals = signals
        self._manager = manager
        self._thread = MLXThread(on_exit=release_thread)
        self._entry = Entry(settings, self._thread.busy_for)
        self._connections = Connections(
            most_connections(raise_limit(), settings.max_connections),
            header_timeout=settings.header_timeout,
            idle_timeout=settings.idle_timeout,
            write_timeout=settings.write_timeout,
        )
        self._entry.connections = self._connections.__len__
        self._entry.busy_seconds = self._thread.busy_seconds
        self._server = HTTPServer(self._entry, self._connections)
        self._loader: ModelLoader | None = None
        self._pressure = PressureWatch(find_source(), self._on_share)
        self._reloader: Reloader | None = None
        if read_again is not None:
            self._reloader = Reloader(read_again, self._entry, self._connections, manager)
        self._tasks: list[asyncio.Task[None]] = []  # cancelled when the daemon stops
        self._stop = asyncio.Event()
        self._force_stop = asyncio.Event()

    @property
    def _settings(self) -> Settings:
        """The settings in force."""
        return self._entry.settings

    async def run(self) -> None:
        """Start, serve, stop."""
        guards = [
            asyncio.create_task(self._manager.beat(self._entry.stalled)),
            asyncio.create_task(end_when_stalled(self._entry.stalled)),
        ]
        calling = self._signals.calling
        with calling(self._on_signal), calling(self._on_hangup, signal.SIGHUP):
            try:
                await self.startup()
                await self._stop.wait()
            finally:
                await self.shutdown()
                for guard in guards:
                    guard.cancel()

    async def startup(self) -> None:
        """Listen, so that clients are answered "loading"; then load the models."""
        self._entry.keys.read()
        if (public := self._settings.public_file) is not None:
            log.warning("all users can read the key in a file", path=public, advice="chmod 600")
        await self._server.setup()
        await self._server.listen(self._listener.socket)
        log.info("listening", socket=str(self._listener.path), pid=os.getpid())
        if self._settings.tcp is not None:
            await self._server.listen_tcp(*self._settings.tcp)
        self._warn_of_libraries()
        slots = slots_of(self._settings)
        names = [slot.name for slot in slots]
        self._entry.folders = await asyncio.to_thread(open_folders, self._settings, names)
        self._thread.start()
        await self._load_models(slots)

    async def shutdown(self) -> None:
        """Refuse waiting requests, let running ones finish within the grace, then end them."""
        self._display.close()
        log.info("stopping")
        self._manager.stopping()
        self._entry.stopping = True
        for task in self._tasks:
            task.cancel()
        if self._loader is not None:
            self._loader.stop.set()
        if self._entry.models is not None:
            await self._entry.models.close()
        if self._residents:
            await self._drain()
        await self._server.close()
        if self._entry.models is not None:
            self._entry.models.workers.close()
        if self._entry.responses is not None:
            await self._entry.responses.close()
        for resident in self._residents:
            await save_state(self._thread, resident.assembly)
        loading = self._entry.models is None or not self._entry.models.started
        try:
            with self._display.waiting(lambda: _LOAD_ENDS if loading else ""):
                await asyncio.to_thread(self._thread.stop, _LOAD_STOP if loading else _THREAD_STOP)
        except TimeoutError as error:
            self._listener.close()
            log.error("leaving the MLX thread behind", loading=loading, error=str(error))  # noqa: TRY400
            # The thread is inside MLX, under which the interpreter cannot end in order.
            os._exit(0 if loading else 1)
        if self._entry.folders is not None:
            self._entry.folders.close()
        log.info("stopped")

    async def _drain(self) -> None:
        residents = self._residents

        def still_running() -> str:
            requests = sum(resident.handoff.live for resident in residents)
            plural = "s" if requests > 1 else ""
            text = f"waiting for {requests} request{plural}, Ctrl-C again to force"
            return text if requests else ""

        async def wait_idle() -> None:
            for resident in residents:
                await resident.handoff.wait_idle()

        for resident in residents:
            resident.handoff.refuse_waiting()
        waits: set[asyncio.Task[Any]] = {
            asyncio.create_task(self._force_stop.wait()),
            asyncio.create_task(wait_idle()),
        }
        with self._display.waiting(still_running):
            grace = self._settings.stop_grace
            await asyncio.wait(waits, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        for resident in residents:
            resident.handoff.end_running()

    async def _load_models(self, slots: list[ModelSlot]) -> None:
        """Load the default model and pinned ones; then take requests."""
        models = self._models(slots)
        self._entry.models, self._entry.pressure = models, self._pressure
        loading = asyncio.ensure_future(_load_first(models))
        stopping: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stop.is_set():
            loading.cancel()
            return
        try:
            await loading
        except (ModelError, UnavailableError) as error:
            raise StartError(str(error)) from error
        await self._take_requests(models)

    def _models(self, slots: list[ModelSlot]) -> ModelPool:
        settings = self._settings
        tenants = TenantTerms(lambda: self._settings)
        workers = Workers(settings.max_waiting, settings.request_timeout, tenants.use)
        self._loader = loader = ModelLoader(
            self._thread,
            lambda: self._settings,
            workers,
            self._pressure,
            tenants,
            self._entry.folders,
        )
        models = ModelPool(
            slots,
            loader,
            workers,
            StartUp(self._manager, settings.download_timeout, self._display),
            tenants.use,
            most_waiting=settings.max_waiting,
            timeout=settings.request_timeout,
        )
        models.aliases = settings.aliases
        return models

    async def _take_requests(self, models: ModelPool) -> None:
        resident = models.default.resident
        if resident is None:
            raise RuntimeError("the default model was loaded and is not")
        assembly, name = resident.assembly, models.default.name
        self._entry.responses = await self._open_responses(assembly)
        models.started = True
        self._tasks += [
            asyncio.create_task(each) for each in (self._pressure.run(), models.unload_idle())
        ]
        self._manager.ready(f"serving {name} on {self._listener.path}")
        self._warn_of_small_bodies(assembly.context_length)
        warn_of_unknown_models(self._settings, models)
        if self._reloader is not None:
            self._tasks.append(asyncio.create_task(self._reloader.run()))
        log.info(
            "ready",
            model=name,
            context=assembly.context_length,
            batches=assembly.runner.batches,
            cache_bytes=assembly.cache.pool.budget.nbytes,
        )
        self._display.served(
            Served.of(resident, self._settings, self._listener.path, self._server.addresses)
        )

    async def _open_responses(self, assembly: Assembly) -> ResponseDesk:
        """Open the store of responses: beside the state on disk, or in memory."""
        folder = None if assembly.disk is None else self._settings.disk_folder
        budget = self._settings.responses_budget
        return ResponseDesk(await asyncio.to_thread(ResponseStore, folder, budget))

    def _on_share(self, share: float) -> None:
        """Use a share of the budget, as the system's memory pressure allows."""
        if self._loader is not None and not self._entry.stopping:
            self._thread.submit(shrink, self._loader.memory, share)
            self._thread.wake()

    @property
    def _residents(self) -> list[Resident]:
        return [] if self._entry.models is None else self._entry.models.residents

    def _on_signal(self) -> None:
        """Stop; a second signal cuts the grace short."""
        if self._stop.is_set():
            self._force_stop.set()
        self._stop.set()
        self._display.stop()

    def _on_hangup(self) -> None:
        """Reload, or stop if the settings cannot be read again."""
        if self._reloader is None:
            self._on_signal()
        else:
            self._reloader.ask()

    def _warn_of_small_bodies(self, context: int) -> None:
        """Warn if `body_bytes` keeps part of the context out of reach."""
        longest = self._entry.bodies.longest_prompt
        if longest < context - 1:  # an answer takes one token at least
            log.warning("body_bytes holds no prompt as long as the context", tokens=longest)

    def _warn_of_libraries(self) -> None:
        if not BLAS.fast:
            log.warning("matrix products are slow", blas=BLAS.name, advice=BLAS.advice)
        if KERNELS.fault:
            log.warning("compiled code is not kept", reason=KERNELS.fault)


async def _load_first(models: ModelPool) -> None:
    """Load the pinned models, then the default one."""
    for slot in reversed(models.slots):
        if slot is models.default or slot.settings.pinned:
            await models.load(slot)
