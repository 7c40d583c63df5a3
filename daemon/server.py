"""A daemon's life: start-up, main loop, shutdown, in this order."""

import asyncio
import os
import signal
from typing import Any

import structlog
import uvloop
from aiohttp import web

from ..cachestore.prefix_cache import Layout, PrefixCache
from ..models.errors import ModelError
from ..models.forward import Forward
from ..models.loader import LoadedModel, load
from ..models.runtime import BLAS, backend, release_thread
from ..scheduler.engine import Engine
from ..scheduler.handoff import Handoff
from ..scheduler.queue import ConversationQueue
from ..scheduler.reuse import PrefixReuse
from ..scheduler.thread import MLXThread
from .app import Front
from .cache_desk import CacheDesk
from .config import Settings
from .errors import SocketError, StartError
from .service import Service
from .sockets import BACKLOG, UnixListener

_CHANNEL_LIMIT = 4096  # events that may wait for one slow client
_THREAD_STOP = 60.0
_LOAD_STOP = 10.0  # a load cannot be interrupted; a small one ends by itself in this time
_CONNECTION_CLOSE = 5.0
_LINGER = 2.0  # a client still sending a refused body gets this long to read the answer

log = structlog.get_logger()


def serve(settings: Settings) -> None:
    """Run a daemon until it is told to stop (SIGTERM, SIGINT).

    Raises:
        StartError: it cannot start; the message says why.
    """
    with UnixListener(settings.socket_path) as listener:
        uvloop.run(Daemon(settings, listener).run())


class Daemon:
    """Owns the MLX thread, the HTTP server and everything between them."""

    def __init__(self, settings: Settings, listener: UnixListener) -> None:
        self._settings = settings
        self._listener = listener
        self._front = Front(settings)
        self._thread = MLXThread(on_exit=release_thread)
        self._runner = web.AppRunner(
            self._front.application(),
            handler_cancellation=True,  # a client that leaves ends its generation
            access_log=None,
            lingering_time=_LINGER,
            shutdown_timeout=_CONNECTION_CLOSE,
        )
        self._queue = ConversationQueue(settings.max_waiting)
        self._handoff: Handoff | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Start, serve, stop."""
        try:
            await self.startup()
            await self._stop.wait()
        finally:
            await self.shutdown()

    async def startup(self) -> None:
        """Listen first, so that clients hear "loading" and not "no such file"; then load."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        await self._runner.setup()
        await web.SockSite(self._runner, self._listener.socket, backlog=BACKLOG).start()
        log.info("listening", socket=str(self._listener.path), pid=os.getpid())
        if self._settings.tcp is not None:
            await self._listen_tcp(*self._settings.tcp)
        self._warn_of_slow_blas()
        self._thread.start()
        await self._load_model()

    async def shutdown(self) -> None:
        """Answer what waits, let what runs finish within the grace, then end it."""
        log.info("stopping")
        self._front.stopping = True
        if self._handoff is not None:
            self._handoff.refuse_waiting()
            await self._drain(self._handoff)
        await self._runner.cleanup()
        loading = self._front.service is None
        try:
            await asyncio.to_thread(self._thread.stop, _LOAD_STOP if loading else _THREAD_STOP)
        except TimeoutError as error:
            self._listener.close()
            log.error("leaving the MLX thread behind", loading=loading, error=str(error))  # noqa: TRY400
            # It is inside MLX, and the interpreter cannot end under it in order.
            os._exit(0 if loading else 1)
        log.info("stopped")

    async def _listen_tcp(self, host: str, port: int) -> None:
        site = web.TCPSite(self._runner, host, port, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            raise SocketError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        for name in self._runner.addresses:
            if isinstance(name, tuple):
                log.info("listening", host=name[0], port=name[1])

    async def _load_model(self) -> None:
        log.info("loading", model=self._settings.model, backend=backend(), blas=BLAS.name)
        loading = asyncio.wrap_future(self._thread.submit(load, self._settings.model))
        stopping: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stop.is_set():
            return
        try:
            self._serve_model(await loading)
        except ModelError as error:
            raise StartError(str(error)) from error

    def _serve_model(self, loaded: LoadedModel) -> None:
        self._handoff = Handoff(self._queue, self._thread.wake, channel_limit=_CHANNEL_LIMIT)
        exact = self._settings.exact
        forward, stack = Forward(loaded, exact=exact), loaded.stack
        cache = PrefixCache(
            Layout(spans=stack.has_spans, checkpoints=stack.has_checkpoints),
            budget=self._settings.cache_budget,
            checkpoints_kept=self._settings.checkpoints_kept,
            grid=self._settings.prefill_chunk if exact else 1,
        )
        reuse = PrefixReuse(
            forward,
            cache,
            fingerprint=loaded.fingerprint,
            interval=self._settings.checkpoint_interval,
        )
        engine = Engine(
            forward,
            reuse,
            self._queue,
            self._handoff.publish,
            eos_ids=loaded.text.eos_ids,
            prefill_chunk=self._settings.prefill_chunk,
            max_batch=self._settings.max_batch,
            max_stall=self._settings.max_stall_ms / 1000,
            exact=exact,
        )
        self._thread.attach(engine.step)
        self._front.service = Service(
            loaded,
            engine,
            self._queue,
            self._handoff,
            CacheDesk(self._thread, cache),
            batches=forward.batches,
            exact=exact,
            request_timeout=self._settings.request_timeout,
        )
        log.info(
            "ready", model=loaded.name, context=loaded.context_length, cache_bytes=cache.budget
        )

    async def _drain(self, handoff: Handoff) -> None:
        hurry = asyncio.ensure_future(self._hurry.wait())
        idle = asyncio.ensure_future(handoff.wait_idle())
        await asyncio.wait(
            {hurry, idle},
            timeout=self._settings.stop_grace,
            return_when=asyncio.FIRST_COMPLETED,
        )
        hurry.cancel()
        idle.cancel()
        handoff.end_running()

    def _on_signal(self) -> None:
        """Stop; a second signal cuts the grace short."""
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _warn_of_slow_blas(self) -> None:
        if backend() == "cpu" and not BLAS.fast:
            log.warning("matrix products are slow", blas=BLAS.name, advice=BLAS.advice)
