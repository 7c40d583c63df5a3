"""What every handler stands on: who asks, what was sent, and how answers go back."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from aiohttp import web

from ....scheduler.errors import UnavailableError
from ....scheduler.limits import RETRY_AFTER
from ....scheduler.times import Activity
from ...config import Settings, TenantSettings, tenant_settings
from ...identity.caller import Caller
from ...identity.conversations import check_name, lines_of
from ...identity.key_ring import KeyRing
from ...identity.priorities import priority_of
from ...models.pool import ModelPool
from ...models.slot import ModelSlot
from ...observability.daemon_metrics import DaemonMetrics, DaemonView
from ...observability.metrics import render
from ...observability.status import State, Status, state_of, status
from ...protocols.answers import AnswerEncoder
from ...protocols.generation_request import GenerationBody
from ...requests.arrivals import Arrival, Arrivals, Line
from ...requests.generations import Generations
from ...requests.service import Service, still_loading
from ...responses.desk import ResponseDesk
from ..answer_headers import ARRIVAL, ENTERED, HELD, SHARE, STREAM
from ..bodies import MAX_VALUES, SMALL_BODY, BodyBudget, check_values, read_body
from ..connection import connection_of
from ..cors import CrossOrigin
from ..decoding import Body, ModelBody, decode
from ..streaming import EventStream
from .answering import event_stream, json_in_pieces, json_response
from .callers import caller_of

if TYPE_CHECKING:
    from ....cachestore.disk.model_folders import ModelFolders
    from ...models.pressure import PressureWatch

Named = TypeVar("Named", bound=ModelBody)


class Received(NamedTuple, Generic[Named]):
    """A request that was read: whose it is, who serves it, what it says."""

    caller: Caller
    service: Service
    body: Named


class Entry:
    """Reads requests and sends answers, whatever protocol they are in.

    Attributes:
        models: None until the daemon serves.
        responses: those that are stored; None until then.
        pressure: of the system's memory; None until then.
        folders: for state on disk; None until then, and where none is kept.
        connections: tells how many are open.
        busy_seconds: tells for how long the MLX thread has worked.
        metrics: those that all models share.
        stopping: the daemon takes no further requests.
        bodies: the budget of what is read.
        cross_origin: which web pages may use the daemon.
        settings: those in force.
        keys: that callers may send.

    Args:
        settings: of the daemon.
        busy_for: tells for how many seconds the MLX thread has been in one call or step.
    """

    def __init__(self, settings: Settings, busy_for: Callable[[], float] = lambda: 0.0) -> None:
        self.models: ModelPool | None = None
        self.responses: ResponseDesk | None = None
        self.pressure: PressureWatch | None = None
        self.folders: ModelFolders | None = None
        self.connections: Callable[[], int] = lambda: 0
        self.busy_seconds: Callable[[], float] = lambda: 0.0
        self.metrics = DaemonMetrics(self._view)
        self.stopping = False
        self.bodies = BodyBudget(settings.body_budget)
        self.keys = KeyRing(settings.keys_path)
        self._arrivals = Arrivals()
        self._busy_for = busy_for
        self._others = False  # another user than the daemon's has asked over the Unix socket
        self.reload(settings)

    def reload(self, settings: Settings) -> None:
        """Answer by these settings from now on."""
        self.settings = settings
        if settings.keys_path != self.keys.path:
            self.keys = KeyRing(settings.keys_path, wanted=self.keys.wanted())
        self.cross_origin = CrossOrigin(settings.cors_origins)

    def caller(self, request: web.Request) -> Caller:
        """Say whose request it is.

        Raises:
            APIError: it is nobody's who may ask, or a header has what is of no use.
        """
        found = caller_of(request, self.settings, self.keys)
        self._others = self._others or not (found.alone or found.operator)
        return found._replace(alone=found.alone and not self._others)

    def tenant(self, name: str) -> TenantSettings:
        """Say what is set for a tenant."""
        return tenant_settings(self.settings.tenants, name)

    def find(self, name: str | None, tenant: str) -> ModelSlot:
        """Find a model for a tenant.

        Raises:
            APIError: there is none of that name that it may use.
            UnavailableError: the daemon still starts.
        """
        return self.pool().find(name, self.tenant(tenant).models)

    def pool(self) -> ModelPool:
        """Return the models.

        Raises:
            UnavailableError: the daemon still starts.
        """
        if self.models is None or not self.models.started:
            raise still_loading()
        return self.models

    def loaded(self, request: web.Request) -> Service:
        """Return what serves the model that a query names; it is not loaded for that.

        Raises:
            APIError: there is no such model.
            UnavailableError: it is not loaded.
        """
        slot = self.find(request.query.get("model"), self.caller(request).tenant)
        if slot.resident is None:
            raise UnavailableError(f"{slot.name} is not loaded", retry_after=RETRY_AFTER)
        return slot.resident.service

    def stored(self) -> ResponseDesk:
        """Return the desk of stored responses.

        Raises:
            UnavailableError: the model is still loading.
        """
        if self.responses is None:
            raise still_loading()
        return self.responses

    def status(self, caller: Caller) -> Status:
        """Say how the daemon is; of others' requests, to who sees all only."""
        return status(
            self.models,
            self._arrivals,
            self.state(),
            self.pressure,
            self.folders,
            caller.watches_only,
            self.tenant(caller.tenant).models,
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

    def state(self) -> State:
        """Say so in a word."""
        return state_of(self.models, stopping=self.stopping, busy_for=self._busy_for())

    def stalled(self) -> bool:
        """Whether an engine does not get on any more."""
        return self.state() == "stalled"

    async def read(
        self, request: web.Request, kind: type[Named], *, queued: bool = True
    ) -> Received[Named]:
        """Read a request of a model: who asks, and what for. The model is loaded if need be.

        Args:
            request: as it came.
            kind: of its body.
            queued: an answer is generated; else no request of its conversation waits for it.

        Raises:
            APIError: nobody may ask so, it is no such body, or there is no such model.
            RequestError: the model cannot be had, or other bodies take the room.
        """
        caller = self.caller(request)
        self.pool()  # no body is read for a daemon that still starts
        body, arrival = await self.body(request, kind, caller)
        slot, lines, stream = self.find(body.model, caller.tenant), list[Line](), None
        if isinstance(body, GenerationBody):
            highest = self.tenant(caller.tenant).priority
            arrival.priority = priority_of(request.headers, highest, flex=body.flex)
            if arrival.conversation is None:
                arrival.conversation = check_name(body.conversation_name, "conversation")
            caller = caller._replace(conversation=arrival.conversation, priority=arrival.priority)
            if queued:
                lines = lines_of(slot.name, caller.conversation, caller.session, body)
            if body.stream:
                stream = request[STREAM] = event_stream(request, self.settings)
        arrival.know(lines)
        service = await self.use(request, slot, caller, stream)
        return Received(caller._replace(arrival=arrival), service, body)

    async def use(
        self,
        request: web.Request,
        slot: ModelSlot,
        caller: Caller,
        stream: EventStream | None = None,
    ) -> Service:
        """Keep a model loaded until a request has been answered; it is loaded if need be.

        Args:
            request: that uses it.
            slot: the model.
            caller: whose request it is.
            stream: of the answer, if it is one: it says meanwhile what is waited for.

        Raises:
            RequestError: the model cannot be had.
        """
        arrival = request[ARRIVAL]
        arrival.model = slot.name
        sees_why = caller.sees_only is None
        using = self.pool().use(slot, caller.tenant, request[HELD], caller.wait, sees_why=sees_why)
        if slot.serves:
            return await using
        if stream is not None:
            using = stream.wait_for(using, f"loading {slot.name}")
        with arrival.waiting(Activity.MODEL):
            return await using

    def _arrive(self, request: web.Request, caller: Caller) -> Arrival:
        """Note that a request has come as a whole."""
        arrival = request[ARRIVAL] = self._arrivals.arrive(caller.tenant, caller.request_id)
        arrival.conversation, arrival.priority = caller.conversation, caller.priority
        request[HELD].callback(arrival.leave)
        return arrival

    async def body(
        self, request: web.Request, kind: type[Body], caller: Caller
    ) -> tuple[Body, Arrival]:
        """Read and decode a body; a large one off the event loop.

        Args:
            request: whose body it is.
            kind: what it shall be.
            caller: whose request it is.

        Returns:
            The body, and the request's place among those that are not queued yet.

        Raises:
            APIError: it is no such body.
            UnavailableError: other bodies take the room.
        """
        share, connection = request[SHARE], connection_of(request)
        share.assign(caller.tenant, operator=caller.operator)
        if connection is not None:
            connection.reading(caller.tenant)
        raw = await read_body(
            request,
            share,
            largest=self.bodies.largest,
            within=self.settings.read_timeout,
        )
        if connection is not None:
            connection.answering()
        arrival = self._arrive(request, caller)
        if len(raw) <= SMALL_BODY:
            return decode(raw, kind), arrival
        models = self.pool()
        most = MAX_VALUES + models.longest_context
        size = len(raw)
        decoding = models.workers.run(
            lambda _: _decode_large(raw, kind, most), size, caller.tenant, caller.wait
        )
        return await decoding, arrival

    async def answer(
        self,
        request: web.Request,
        generations: Generations,
        encoder: AnswerEncoder,
        *,
        stream: bool | None,
    ) -> web.StreamResponse:
        """Generate, and send what comes: as a stream of events, or whole.

        Raises:
            RequestError: a request ended with an error before anything was sent.
        """
        async with generations:
            request[ENTERED] = True
            if not stream:
                await generations.finish()
                if generations.has_logprobs:
                    return await json_in_pieces(encoder.whole())
                return json_response(encoder.whole())
            return await request[STREAM].send(generations, encoder)


def _decode_large(raw: bytearray, kind: type[Body], most_values: int) -> Body:
    check_values(raw, most_values)
    return decode(raw, kind)
