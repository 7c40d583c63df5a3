"""What every handler stands on: who asks, what was sent, and how answers go back."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from ...scheduler.bounds import RETRY_AFTER
from ...scheduler.errors import UnavailableError
from ..answer_headers import (
    ARRIVAL,
    ARRIVED_AT,
    ENTERED,
    HELD,
    REQUEST_ID,
    SHARE,
    STREAM,
    answer_headers,
)
from ..arrivals import Arrivals
from ..bodies import MAX_VALUES, SMALL_BODY, BodyBudget, check_values, read_body
from ..config import Settings, TenantSettings, tenant_settings
from ..connection import connection_of
from ..conversations import lines_of, named_conversation, session
from ..cors import CrossOrigin
from ..deadlines import Wait, timeout_of
from ..decoding import Body, ModelBody, decode
from ..generations import Generations
from ..key_ring import KeyRing
from ..model_pool import ModelPool
from ..model_slot import ModelSlot
from ..operators import is_operator
from ..priorities import priority_of
from ..protocols.answers import AnswerEncoder
from ..protocols.generation_request import GenerationBody
from ..response_desk import ResponseDesk
from ..service import Caller, Service, still_loading
from ..status import State, Status, state_of, status
from ..streaming import EventStream
from ..tenants import identify

if TYPE_CHECKING:
    from ..pressure import PressureWatch

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
        self.stopping = False
        self.bodies = BodyBudget(settings.body_budget)
        self.keys = KeyRing(settings.keys_path)
        self._arrivals = Arrivals()
        self._busy_for = busy_for
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
        tenant = identify(request, self.settings, self.keys)
        return Caller(
            request[REQUEST_ID],
            tenant,
            named_conversation(request.headers),
            session(request.headers),
            request[ARRIVED_AT],
            request[SHARE],
            Wait(request[ARRIVED_AT], timeout_of(request.headers)),
            priority_of(request.headers, self.tenant(tenant).priority, flex=False),
            operator=is_operator(request, tenant, self.settings.tenants),
        )

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
        """Say how the daemon is; of others' requests, to the operator only."""
        tenant = None if caller.operator else caller.tenant
        return status(self.models, self.state(), self.pressure, tenant)

    def state(self) -> State:
        """Say so in a word."""
        return state_of(self.models, stopping=self.stopping, busy_for=self._busy_for())

    def stalled(self) -> bool:
        """Whether an engine does not get on any more."""
        return self.state() == "stalled"

    async def read(self, request: web.Request, kind: type[Named]) -> Received[Named]:
        """Read a request of a model: who asks, and what for. The model is loaded if need be.

        Raises:
            APIError: nobody may ask so, it is no such body, or there is no such model.
            RequestError: the model cannot be had, or other bodies take the room.
        """
        caller, models = self.caller(request), self.pool()
        arrived = partial(self._arrive, request, caller.tenant)
        body = await self.body(request, kind, caller.wait, arrived)
        slot = self.find(body.model, caller.tenant)
        using = models.use(slot, caller.tenant, request[HELD], caller.wait)
        arrival = request[ARRIVAL]
        if not isinstance(body, GenerationBody):
            arrival.leave()  # it is never queued
        else:
            highest = self.tenant(caller.tenant).priority
            priority = priority_of(request.headers, highest, flex=body.flex)
            arrival.know(lines_of(slot.name, caller.conversation, caller.session, body))
            caller = caller._replace(priority=priority, arrival=arrival)
            if body.stream:
                request[STREAM] = self._stream(request)
                if not slot.serves:
                    using = request[STREAM].wait_for(using, f"loading {slot.name}")
        return Received(caller, await using, body)

    def _arrive(self, request: web.Request, tenant: str) -> None:
        """Note that a request has come as a whole."""
        request[ARRIVAL] = self._arrivals.arrive(tenant)
        request[HELD].callback(request[ARRIVAL].leave)

    async def body(
        self,
        request: web.Request,
        kind: type[Body],
        wait: Wait,
        arrived: Callable[[], object] = lambda: None,
    ) -> Body:
        """Read and decode a body; a large one off the event loop.

        Args:
            request: whose body it is.
            kind: what it shall be.
            wait: how long the request may take.
            arrived: called when it has been read, before it is decoded.

        Raises:
            APIError: it is no such body.
            UnavailableError: other bodies take the room.
        """
        raw = await read_body(
            request,
            request[SHARE],
            largest=self.bodies.largest,
            within=self.settings.read_timeout,
        )
        if (connection := connection_of(request)) is not None:
            connection.answering()
        arrived()
        if len(raw) <= SMALL_BODY:
            return decode(raw, kind)
        models = self.pool()
        most = MAX_VALUES + models.longest_context
        size = len(raw)
        return await models.workers.run(lambda _: _decode_large(raw, kind, most), size, wait)

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
                return json_response(encoder.whole())
            return await (request.get(STREAM) or self._stream(request)).send(generations, encoder)

    def _stream(self, request: web.Request) -> EventStream:
        return EventStream(
            request,
            answer_headers(request),
            keepalive=self.settings.keepalive,
            write_timeout=self.settings.write_timeout,
        )


def json_response(data: Any, status: int = 200) -> web.Response:
    """An answer in JSON."""
    return web.Response(
        body=msgspec.json.encode(data), status=status, content_type="application/json"
    )


def _decode_large(raw: bytearray, kind: type[Body], most_values: int) -> Body:
    check_values(raw, most_values)
    return decode(raw, kind)
