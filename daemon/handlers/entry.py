"""What every handler stands on: who asks, what was sent, and how answers go back."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from ..aliases import DEFAULT_MODEL
from ..answer_headers import ARRIVED_AT, ENTERED, REQUEST_ID, SHARE, answer_headers
from ..bodies import MAX_VALUES, SMALL_BODY, BodyBudget, check_values, read_body
from ..config import Settings
from ..connection import connection_of
from ..conversations import named_conversation, session
from ..cors import CrossOrigin
from ..decoding import Body, ModelBody, decode
from ..failures import APIError
from ..generations import Generations
from ..protocols.answers import AnswerEncoder
from ..quoting import quote
from ..response_desk import ResponseDesk
from ..service import Caller, Service, still_loading
from ..status import State, Status, state_of, status
from ..streaming import EventStream
from ..tenants import identify

if TYPE_CHECKING:
    from ..assembly import Phase

Named = TypeVar("Named", bound=ModelBody)


class Received(NamedTuple, Generic[Named]):
    """A request that was read: whose it is, who serves it, what it says."""

    caller: Caller
    service: Service
    body: Named


class Entry:
    """Reads requests and sends answers, whatever protocol they are in.

    Attributes:
        service: None until the model is loaded.
        responses: those that are stored; None until the model is loaded.
        phase: what start-up does; None once the model is served.
        stopping: the daemon takes no further requests.
        bodies: the budget of what is read.
        cross_origin: which web pages may use the daemon.
        settings: those in force.

    Args:
        settings: of the daemon.
        busy_for: tells for how many seconds the MLX thread has been in one call or step.
    """

    def __init__(self, settings: Settings, busy_for: Callable[[], float] = lambda: 0.0) -> None:
        self.service: Service | None = None
        self.responses: ResponseDesk | None = None
        self.phase: Phase | None = None
        self.stopping = False
        self.bodies = BodyBudget(settings.body_budget)
        self._busy_for = busy_for
        self.reload(settings)

    def reload(self, settings: Settings) -> None:
        """Answer by these settings from now on."""
        self.settings = settings
        self.cross_origin = CrossOrigin(settings.cors_origins)

    def caller(self, request: web.Request) -> Caller:
        """Say whose request it is.

        Raises:
            APIError: it is nobody's who may ask, or names a conversation that is no name.
        """
        return Caller(
            request[REQUEST_ID],
            identify(request, self.settings.api_key, self.settings.cors_origins),
            named_conversation(request.headers),
            session(request.headers),
            request[ARRIVED_AT],
            request[SHARE],
        )

    def loaded(self) -> Service:
        """Return the service.

        Raises:
            UnavailableError: the model is still loading.
        """
        if self.service is None:
            raise still_loading()
        return self.service

    def stored(self) -> ResponseDesk:
        """Return the desk of stored responses.

        Raises:
            UnavailableError: the model is still loading.
        """
        if self.responses is None:
            raise still_loading()
        return self.responses

    def status(self) -> Status:
        """Say how the daemon is."""
        return status(self.service, self.state(), self.phase)

    def state(self) -> State:
        """Say so in a word."""
        return state_of(self.service, stopping=self.stopping, busy_for=self._busy_for())

    def stalled(self) -> bool:
        """Whether the engine does not get on any more."""
        return self.state() == "stalled"

    def model_names(self) -> list[str]:
        """List what the model may be called: its own name, and then its aliases."""
        return list(dict.fromkeys([self.loaded().model_name, *self.settings.aliases]))

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served.

        Raises:
            APIError: 404, saying what there is, and how there can be more.
        """
        served = self.model_names()
        if name in (None, "", DEFAULT_MODEL) or name in served:
            return
        message = (
            f"there is no model {quote(name)}; this daemon serves {served[0]!r}; to serve it by "
            "that name too, start it with --alias NAME or [models.aliases] in umbel.toml"
        )
        raise APIError(404, message, code="model_not_found", param="model")

    async def read(self, request: web.Request, kind: type[Named]) -> Received[Named]:
        """Read a request of the model: who asks, and what for.

        Raises:
            APIError: nobody may ask so, it is no such body, or there is no such model.
            UnavailableError: the model is still loading, or other bodies take the room.
        """
        caller, service = self.caller(request), self.loaded()
        body = await self.body(request, kind)
        self.check_model(body.model)
        return Received(caller, service, body)

    async def body(self, request: web.Request, kind: type[Body]) -> Body:
        """Read and decode a body; a large one off the event loop.

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
        if len(raw) <= SMALL_BODY:
            return decode(raw, kind)
        service = self.loaded()
        most = MAX_VALUES + service.context_length
        return await service.workers.run(lambda _: _decode_large(raw, kind, most), len(raw))

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
            events = EventStream(
                request,
                answer_headers(request),
                keepalive=self.settings.keepalive,
                write_timeout=self.settings.write_timeout,
            )
            return await events.send(generations, encoder)


def json_response(data: Any, status: int = 200) -> web.Response:
    """An answer in JSON."""
    return web.Response(
        body=msgspec.json.encode(data), status=status, content_type="application/json"
    )


def _decode_large(raw: bytearray, kind: type[Body], most_values: int) -> Body:
    check_values(raw, most_values)
    return decode(raw, kind)
