"""OpenAI's responses."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Raw

from ...protocols.responses import ResponsesRequest
from ...quoting import quote
from ...requests.arrivals import Arrival
from ...responses.store import NoSuchResponseError, Past, ResponseStore, StoredItem, StoredResponse
from ...responses.turn import ResponseTurn, TurnBody, find_past, unfinished
from ..exchange import EXCHANGE, json_response
from ..failures import APIError
from .entry import Entry

T = TypeVar("T")

MAX_LISTED = 100
_LISTED = 20


class ResponsesHandlers:
    """Handlers below `/v1/responses`."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._running: dict[tuple[str, str], ResponseTurn] = {}

    def routes(self) -> list[web.RouteDef]:
        """List the routes."""
        return [
            web.post("/v1/responses", self.create),
            web.post("/v1/responses/input_tokens", self.input_tokens),
            web.get("/v1/responses/{id}", self.retrieve),
            web.delete("/v1/responses/{id}", self.delete),
            web.get("/v1/responses/{id}/input_items", self.input_items),
            web.post("/v1/responses/{id}/cancel", self.cancel),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/responses`."""
        arrival, service, body = await self._entry.read(request, ResponsesRequest)
        past = await self._past(body, arrival)
        turn = ResponseTurn(body, arrival, past, service.model_name, self._entry.stored())
        running, exchange = (arrival.tenant, turn.id), request[EXCHANGE]
        try:
            generations = await service.generate(turn.request, arrival)
            answers = turn.answers(generations)
            self._running[running] = turn
            if body.stream:
                return await exchange.answer(generations, answers)
            async with generations:  # its items are put together in the order in which they come
                exchange.has_generation = True
                while (more := await generations.next()) is not None:
                    answers.take(more.deltas or [])
                return json_response(answers.whole())
        except Exception:
            turn.discard()
            raise
        finally:
            self._running.pop(running, None)
            turn.leave()

    async def input_tokens(self, request: web.Request) -> web.Response:
        """`POST /v1/responses/input_tokens`: the number of tokens of a response's prompt."""
        arrival, service, body = await self._entry.read(request, ResponsesRequest, queued=False)
        past, store = await self._past(body, arrival), self._entry.stored().store
        turn = TurnBody(body=body, tenant=arrival.tenant, past=past, store=store)
        tokens = await service.count_tokens(turn, arrival)
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    async def retrieve(self, request: web.Request) -> web.Response:
        """`GET /v1/responses/{id}`."""
        if request.query.get("stream", "false") != "false":
            message = "a stored response cannot be streamed; leave stream out"
            raise APIError(400, message, code="unsupported_parameter", param="stream")
        if (turn := self._turn(request)) is not None:
            return json_response(turn.now())
        return json_response(_object(await self._look(request, ResponseStore.get)))

    async def delete(self, request: web.Request) -> web.Response:
        """`DELETE /v1/responses/{id}`; of one that is being made, nothing is stored."""
        turn = self._turn(request)
        if turn is not None:
            turn.discard()
        elif not await self._look(request, ResponseStore.delete):
            raise _not_found(request)
        name = request.match_info["id"]
        return json_response({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: web.Request) -> web.Response:
        """`GET /v1/responses/{id}/input_items`."""
        turn = self._turn(request)
        items = turn.items if turn else await self._look(request, ResponseStore.input_items)
        return json_response(_page(items, request.query))

    async def cancel(self, request: web.Request) -> web.Response:
        """`POST /v1/responses/{id}/cancel`: end one that is being made."""
        turn = self._turn(request)
        if turn is not None and turn.status == "in_progress":
            return json_response(turn.cancel())
        status = turn.status if turn else (await self._look(request, ResponseStore.get)).status
        message = f"the response is {status}; only one that is being made can be cancelled"
        raise APIError(400, message)

    async def _past(self, body: ResponsesRequest, arrival: Arrival) -> Past | None:
        """Find the responses that a body continues; raises as `find_past` does."""
        previous = body.previous_response_id or ""
        if (turn := self._made(arrival.tenant, previous)) is not None:
            raise unfinished(previous, turn.status)
        return await find_past(body.previous_response_id, arrival, self._entry.stored())

    def _turn(self, request: web.Request) -> ResponseTurn | None:
        """Find a response that is being made."""
        return self._made(self._entry.caller(request).tenant, request.match_info["id"])

    def _made(self, tenant: str, name: str) -> ResponseTurn | None:
        """Find a response that is being made; once it is settled, the store has it."""
        turn = self._running.get((tenant, name))
        return None if turn is None or turn.is_settled else turn

    async def _look(self, request: web.Request, find: Callable[[ResponseStore, str, str], T]) -> T:
        """Ask the store for a response; raises an APIError 404 if it is not there."""
        tenant, name = self._entry.caller(request).tenant, request.match_info["id"]
        self._entry.pool()
        try:
            return await self._entry.stored().look(lambda store: find(store, tenant, name))
        except NoSuchResponseError as error:
            raise _not_found(request) from error


def _object(stored: StoredResponse) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(stored.body, type=dict[str, Raw])
    return {**fields, "output": [Raw(item.body) for item in stored.output]}


def _page(items: list[StoredItem], query: Mapping[str, str]) -> dict[str, Any]:
    """List some items, newest first unless asked otherwise.

    Raises:
        APIError: 400, the limit, the order or the item named is of no use.
    """
    limit, order, after = (query.get(name) for name in ("limit", "order", "after"))
    if limit is not None and limit not in map(str, range(1, MAX_LISTED + 1)):
        message = f"limit is {quote(limit)}; send 1 to {MAX_LISTED}"
        raise APIError(400, message, param="limit")
    if order not in (None, "asc", "desc"):
        raise APIError(400, f"order is {quote(order)}; send asc or desc", param="order")
    listed = items if order == "asc" else items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(listed) if item.id == after]
        if not places:
            message = f"after is {quote(after)}, which is no item of this response"
            raise APIError(400, message, param="after")
        listed = listed[places[0] + 1 :]
    page = listed[: int(limit or _LISTED)]
    return {
        "object": "list",
        "data": [Raw(item.body) for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(page) < len(listed),
    }


def _not_found(request: web.Request) -> APIError:
    message = f"Response with id {quote(request.match_info['id'])} not found."
    return APIError(404, message, code="response_not_found")
