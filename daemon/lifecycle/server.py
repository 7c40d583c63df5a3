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
from ..models.assembly import Assembly, open_folders
from ..models.loader import ModelLoader, shrink
from ..models.pool import ModelPool
from ..models.pressure import PressureWatch, find_source
from ..models.slot import ModelSlot, Resident, slots_of
from ..requests.workers import Workers
from ..responses.desk import ResponseDesk
from ..responses.store import ResponseStore
from . import launchd
from .descriptors import most_connections, raise_limit
from .display import Display, Served
from .drain import drain
from .reload import Reloader, warn_of_unknown_models
from .service_manager import InheritedListener, ServiceManager, inherited
from .signals import StopSignals
from .start_up import StartUp
from .state_saving import save_state

_SWITCH = 5e-4
"""Seconds after which a thread gives the interpreter to one that waits for it, ten times as often
as usual: the thread that owns MLX lets go of it in each comparison of arrays and each evaluation,
and all streams wait until it has it again."""

_THREAD_STOP = 60.0
_LOAD_STOP = 10.0  # until what a load computes ends; what is next does not begin
_LOAD_ENDS = f"waiting for the load to end, for {_LOAD_STOP:.0f} s at most"

log = structlog.get_logger()


def serve(
    settings: Settings,
    *,
    temporary: bool = False,
    read_again: Callable[[], Settings] | None = None,
    display: Display | None = None,
) -> None:
    """Run a daemon until it is told to stop (SIGTERM, SIGINT, SIGHUP); they are ignored then.

    Args:
        settings: what it serves, and where.
        temporary: it leaves nothing behind, not even the folder of its socket.
        read_again: reads the settings when SIGHUP comes, which then stops nothing.
        display: shows what it does to a person.

    Raises:
        StartError: it cannot start; the message says why.
    """
    gc.freeze()  # what was imported stays: each collection would look through all of it
    sys.setswitchinterval(_SWITCH)
    manager = ServiceManager.of(os.environ)
    with (
        closing(display or Display()) as shown,
        StopSignals() as signals,
        closing(
            inherited(os.environ)
            or launchd.inherited()
            or UnixListener(settings.socket_path, temporary=temporary)
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
        self._tasks: list[asyncio.Task[None]] = []  # that run for as long as requests are served
        self._stop = asyncio.Event()
        self._force_stop = asyncio.Event()

    @property
    def _settings(self) -> Settings:
        """Those in force."""
        return self._entry.settings

    async def run(self) -> None:
        """Start, serve, stop."""
        guards = [
            asyncio.create_task(self._manager.beat(self._entry.stalled)),
            asyncio.create_task(launchd.end_when_stalled(self._entry.stalled)),
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
        """Listen first, so that clients hear "loading" and not "no such file"; then load."""
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
        """Answer what waits, let what runs finish within the grace, then end it."""
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
            grace = self._settings.stop_grace
            await drain(self._residents, self._force_stop, grace, self._display)
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
            # It is inside MLX, and the interpreter cannot end under it in order.
            os._exit(0 if loading else 1)
        if self._entry.folders is not None:
            self._entry.folders.close()
        log.info("stopped")

    async def _load_models(self, slots: list[ModelSlot]) -> None:
        """Load the default model and those that are pinned, and take requests from then on."""
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
        models.take_requests()
        self._tasks += [
            asyncio.create_task(each) for each in (self._pressure.run(), models.residency.run())
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
        """Open what is stored of responses: beside the state on disk, or else in memory."""
        folder = None if assembly.disk is None else self._settings.disk_folder
        budget = self._settings.responses_budget
        return ResponseDesk(await asyncio.to_thread(ResponseStore, folder, budget))

    def _on_share(self, share: float) -> None:
        """Shrink the budget, or let it grow again, as the system's memory allows."""
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
        """Reload, or stop where the settings cannot be read again."""
        if self._reloader is None:
            self._on_signal()
        else:
            self._reloader.ask()

    def _warn_of_small_bodies(self, context: int) -> None:
        """Say so if `body_bytes` keeps part of the context out of reach."""
        longest = self._entry.bodies.longest_prompt
        if longest < context - 1:  # an answer takes one token at least
            log.warning("body_bytes holds no prompt as long as the context", tokens=longest)

    def _warn_of_libraries(self) -> None:
        if not BLAS.fast:
            log.warning("matrix products are slow", blas=BLAS.name, advice=BLAS.advice)
        if KERNELS.fault:
            log.warning("compiled code is not kept", reason=KERNELS.fault)


async def _load_first(models: ModelPool) -> None:
    """Load the models that are pinned, and then the default one, which may have to fit."""
    for slot in reversed(models.slots):
        if slot is models.default or slot.settings.pinned:
            await models.residency.load(slot)
