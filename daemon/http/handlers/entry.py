"""The entry of all requests: it identifies senders, reads bodies, and finds models."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from ....scheduler.errors import UnavailableError
from ....scheduler.limits import RETRY_AFTER
from ....scheduler.times import Activity
from ...config import Settings, tenant_settings
from ...identity.caller import Caller, caller_of, priority_of
from ...identity.conversations import check_name, order_keys
from ...identity.keys import KeyRing
from ...models.pool import ModelPool
from ...models.slot import ModelSlot
from ...observability.daemon_metrics import DaemonMetrics, DaemonView
from ...observability.metrics import render
from ...observability.status import State, Status, state_of, status
from ...protocols.generation_request import GenerationBody
from ...requests.arrivals import Arrival, Arrivals, Wait
from ...requests.service import Service, still_loading
from ...responses.desk import ResponseDesk
from ..bodies import (
    MAX_VALUES,
    SMALL_BODY,
    Body,
    BodyBudget,
    ModelBody,
    check_values,
    decode,
    read_body,
)
from ..connections import connection_of
from ..exchange import EXCHANGE

if TYPE_CHECKING:
    from ....cachestore.disk.model_folders import ModelFolders
    from ...models.pressure import PressureWatch
    from ...responses.turn import ResponseTurn

Named = TypeVar("Named", bound=ModelBody)


class Entry:
    """Reads requests, whatever protocol they are in.

    Args:
        settings: of the daemon.
        busy_for: returns the seconds that the MLX thread has been in one call or step.
    """

    def __init__(self, settings: Settings, busy_for: Callable[[], float] = lambda: 0.0) -> None:
        self.settings = settings  # those in force
        self.keys = KeyRing(settings.keys_path)
        self.bodies = BodyBudget(settings.body_budget)
        self.metrics = DaemonMetrics(self._view)  # of all models together
        self.turns: dict[tuple[str, str], ResponseTurn] = {}  # being made, by tenant and id
        self.stopping = False  # the daemon takes no further requests
        self.connections: Callable[[], int] = lambda: 0  # open ones
        self.busy_seconds: Callable[[], float] = lambda: 0.0  # of the MLX thread
        # None until the daemon serves; no folders if no state is kept on disk
        self.models: ModelPool | None = None
        self.responses: ResponseDesk | None = None
        self.pressure: PressureWatch | None = None
        self.folders: ModelFolders | None = None
        self._arrivals = Arrivals()
        self._busy_for = busy_for
        self._has_other_users = False  # on the Unix socket, besides the daemon's

    def reload(self, settings: Settings) -> None:
        """Answer by these settings from now on."""
        self.settings = settings
        if settings.keys_path != self.keys.path:
            self.keys = KeyRing(settings.keys_path, wanted=self.keys.wanted())

    # -- the sender and the models that it may use ------------------------------------------------

    def caller(self, request: web.Request) -> Caller:
        """Identify a request's sender; raises APIError as `caller_of` does."""
        found = caller_of(request, self.settings, self.keys)
        self._has_other_users = self._has_other_users or not (found.alone or found.operator)
        return found._replace(alone=found.alone and not self._has_other_users)

    def allowed_models(self, tenant: str) -> Collection[str] | None:
        """Return the models that a tenant may use; None for all."""
        return tenant_settings(self.settings.tenants, tenant).models

    def pool(self) -> ModelPool:
        """Return the models; raises UnavailableError while the daemon starts."""
        if self.models is None or not self.models.started:
            raise still_loading()
        return self.models

    def find(self, name: str | None, tenant: str) -> ModelSlot:
        """Find a model for a tenant.

        Raises:
            APIError: the tenant may use none of that name.
            UnavailableError: the daemon still starts.
        """
        return self.pool().find(name, self.allowed_models(tenant))

    def loaded(self, request: web.Request, tenant: str) -> Service:
        """Return the service of the model that a query names; it is not loaded for that.

        Raises:
            APIError: there is no such model.
            UnavailableError: it is not loaded.
        """
        slot = self.find(request.query.get("model"), tenant)
        if slot.resident is None:
            raise UnavailableError(f"{slot.name} is not loaded", retry_after=RETRY_AFTER)
        return slot.resident.service

    def stored(self) -> ResponseDesk:
        """Return the desk of stored responses; raises UnavailableError while the daemon starts."""
        if self.responses is None:
            raise still_loading()
        return self.responses

    # -- the way of a request ----------------------------------------------------------------------

    async def read(
        self, request: web.Request, kind: type[Named], *, queued: bool = True
    ) -> tuple[Arrival, Service, Named]:
        """Read a request to a model, which is loaded if need be.

        Args:
            request: as it came.
            kind: of its body.
            queued: an answer is generated; else no request of its conversation waits for it.

        Returns:
            The request on its way to the queue, the service of its model, and its body.

        Raises:
            APIError: the sender may not ask, it is no such body, or there is no such model.
            RequestError: the model cannot be had, or other bodies take the room.
        """
        caller = self.caller(request)
        self.pool()  # no body is read for a daemon that still starts
        body, arrival = await self.body(request, kind, caller)
        slot, exchange, keys = self.find(body.model, caller.tenant), request[EXCHANGE], []
        if isinstance(body, GenerationBody):
            highest = tenant_settings(self.settings.tenants, caller.tenant).priority
            arrival.priority = priority_of(request.headers, highest, flex=body.flex)
            if arrival.conversation is None:
                arrival.conversation = check_name(body.conversation_name, "conversation")
            if queued:
                keys = order_keys(slot.name, arrival.conversation, caller.session, body)
            if body.stream:
                exchange.open_stream(request, self.settings)
        arrival.set_keys(keys)
        return arrival, await self.use(request, slot, arrival), body

    async def body(
        self, request: web.Request, kind: type[Body], caller: Caller
    ) -> tuple[Body, Arrival]:
        """Read and decode a body; a large one off the event loop.

        Raises:
            APIError: it is no such body.
            UnavailableError: other bodies take the room.
        """
        exchange, connection = request[EXCHANGE], connection_of(request)
        exchange.share.assign(caller.tenant, operator=caller.operator)
        if connection is not None:
            connection.reading(caller.tenant)
        raw = await read_body(
            request,
            exchange.share,
            largest=self.bodies.largest,
            within=self.settings.read_timeout,
        )
        if connection is not None:
            connection.answering()
        wait = Wait(exchange.arrived_at, caller.timeout)
        arrival = self._arrivals.arrive(exchange.id, caller, exchange.share, wait)
        exchange.held.callback(arrival.leave)
        if len(raw) <= SMALL_BODY:
            return decode(raw, kind), arrival
        models = self.pool()
        most_values, size = MAX_VALUES + models.longest_context, len(raw)
        decoding = models.workers.run(
            lambda _: _decode_large(raw, kind, most_values), size, caller.tenant, wait
        )
        return await decoding, arrival

    async def use(self, request: web.Request, slot: ModelSlot, arrival: Arrival) -> Service:
        """Keep a model loaded until a request has been answered; it is loaded if need be.

        If the answer is a stream, it says meanwhile that the model is loaded.

        Raises:
            RequestError: the model cannot be had.
        """
        arrival.model = slot.name
        exchange = request[EXCHANGE]
        sees_why = arrival.caller.sees_only is None
        using = self.pool().use(
            slot, arrival.tenant, exchange.held, arrival.wait, sees_why=sees_why
        )
        if slot.serves:
            return await using
        if exchange.stream is not None:
            using = exchange.stream.wait_for(using, f"loading {slot.name}")
        with arrival.waiting(Activity.MODEL):
            return await using

    # -- the daemon's state ------------------------------------------------------------------------

    def state(self) -> State:
        """Return the daemon's state in a word."""
        return state_of(self.models, stopping=self.stopping, busy_for=self._busy_for())

    def stalled(self) -> bool:
        """Return True if an engine makes no progress any more."""
        return self.state() == "stalled"

    def status(self, caller: Caller) -> Status:
        """Describe the daemon for `/status`; a tenant sees its own requests alone."""
        return status(
            self.models,
            self._arrivals,
            self.state(),
            self.pressure,
            self.folders,
            caller.watches_only,
            self.allowed_models(caller.tenant),
        )

    def render_metrics(self, caller: Caller) -> bytes:
        """Write `/metrics`, for a tenant its own figures alone.

        Raises:
            UnavailableError: the daemon still starts.
        """
        return render(
            {slot.name: slot.metrics for slot in self.pool().slots},
            self.metrics,
            caller.watches_only,
            vllm_names=self.settings.vllm_metrics,
        )

    def _view(self) -> DaemonView:
        return DaemonView(
            self.state(),
            [] if self.models is None else self.models.slots,
            1.0 if self.pressure is None else self.pressure.status.share,
            self.settings.disk_folder is not None,
            self.folders,
            self.connections(),
            self.busy_seconds(),
        )


ENTRY = web.AppKey("entry", Entry)


def _decode_large(raw: bytearray, kind: type[Body], most_values: int) -> Body:
    check_values(raw, most_values)
    return decode(raw, kind)
