"""OpenAI's responses."""

from typing import Any

import msgspec
from aiohttp import web
from msgspec import Raw

from ..answer_headers import ENTERED
from ..failures import APIError
from ..generations import Generations
from ..protocols.response_answers import ResponseAnswers
from ..protocols.responses import ResponsesRequest
from ..quoting import quote
from ..response_store import NoSuchResponseError, StoredItem, StoredResponse
from ..response_turn import ResponseTurn, TurnBody, find_past
from .entry import Entry, json_response

MAX_LISTED = 100
_LISTED = 20


class ResponsesHandlers:
    """Handlers below `/v1/responses`."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._running: dict[tuple[str, str], ResponseTurn] = {}

    def routes(self) -> list[web.RouteDef]:
        """List what is handled here."""
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
        entry, caller = self._entry, self._entry.caller(request)
        service, desk = entry.loaded(), entry.stored()
        body = await entry.body(request, ResponsesRequest)
        entry.check_model(body.model)
        past = await find_past(body, caller, desk)
        turn = ResponseTurn(body, caller, past, service.model_name, desk)
        running = caller.tenant, turn.id
        try:
            generations = await service.generate(turn.request, caller)
            answers = turn.answers(generations)
            self._running[running] = turn
            if body.stream:
                return await entry.answer(request, generations, answers, stream=True)
            return await self._whole(request, generations, answers)
        except Exception:
            turn.discard()
            raise
        finally:
            self._running.pop(running, None)
            turn.leave()

    async def input_tokens(self, request: web.Request) -> web.Response:
        """`POST /v1/responses/input_tokens`: what a response would have to read."""
        entry, caller = self._entry, self._entry.caller(request)
        service, desk = entry.loaded(), entry.stored()
        body = await entry.body(request, ResponsesRequest)
        entry.check_model(body.model)
        past = await find_past(body, caller, desk)
        turn = TurnBody(body=body, caller=caller, past=past, store=desk.store)
        tokens = await service.count_tokens(turn, caller)
        return json_response({"object": "response.input_tokens", "input_tokens": tokens})

    async def retrieve(self, request: web.Request) -> web.Response:
        """`GET /v1/responses/{id}`."""
        if request.query.get("stream", "false") != "false":
            message = "a stored response cannot be streamed; leave stream out"
            raise APIError(400, message, code="unsupported_parameter", param="stream")
        return json_response(_object(await self._stored(request)))

    async def delete(self, request: web.Request) -> web.Response:
        """`DELETE /v1/responses/{id}`."""
        tenant, name = self._entry.caller(request).tenant, request.match_info["id"]
        self._entry.loaded()
        if not await self._entry.stored().look(lambda store: store.delete(tenant, name)):
            raise _not_found(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def input_items(self, request: web.Request) -> web.Response:
        """`GET /v1/responses/{id}/input_items`."""
        tenant, name = self._entry.caller(request).tenant, request.match_info["id"]
        self._entry.loaded()
        try:
            items = await self._entry.stored().look(lambda store: store.input_items(tenant, name))
        except NoSuchResponseError as error:
            raise _not_found(name) from error
        return json_response(_page(items, request))

    async def cancel(self, request: web.Request) -> web.Response:
        """`POST /v1/responses/{id}/cancel`: end one that is being made."""
        tenant, name = self._entry.caller(request).tenant, request.match_info["id"]
        if (turn := self._running.get((tenant, name))) is not None:
            return json_response(turn.cancel())
        status = (await self._stored(request)).status
        message = f"the response {quote(name)} is {status}; only a running one can be cancelled"
        raise APIError(400, message)

    async def _stored(self, request: web.Request) -> StoredResponse:
        tenant, name = self._entry.caller(request).tenant, request.match_info["id"]
        self._entry.loaded()
        try:
            return await self._entry.stored().look(lambda store: store.get(tenant, name))
        except NoSuchResponseError as error:
            raise _not_found(name) from error

    async def _whole(
        self, request: web.Request, generations: Generations, answers: ResponseAnswers
    ) -> web.Response:
        """Put an answer together item by item, in the order in which they come."""
        async with generations:
            request[ENTERED] = True
            while (more := await generations.next()) is not None:
                answers.take(more.deltas or [])
            return json_response(answers.whole())


def _object(stored: StoredResponse) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(stored.body, type=dict[str, Raw])
    return {**fields, "output": [Raw(item.body) for item in stored.output]}


def _page(items: list[StoredItem], request: web.Request) -> dict[str, Any]:
    """List some items, newest first unless asked otherwise.

    Raises:
        APIError: 400 for a limit, an order or an item that is none.
    """
    limit, order = request.query.get("limit", str(_LISTED)), request.query.get("order", "desc")
    if limit not in map(str, range(1, MAX_LISTED + 1)):
        message = f"limit is {quote(limit)}; send 1 to {MAX_LISTED}"
        raise APIError(400, message, param="limit")
    if order not in ("asc", "desc"):
        raise APIError(400, f"order is {quote(order)}; send asc or desc", param="order")
    listed = items if order == "asc" else items[::-1]
    if (after := request.query.get("after")) is not None:
        places = [place for place, item in enumerate(listed) if item.id == after]
        if not places:
            message = f"after is {quote(after)}, which is no item of this response"
            raise APIError(400, message, param="after")
        listed = listed[places[0] + 1 :]
    page = listed[: int(limit)]
    return {
        "object": "list",
        "data": [Raw(item.body) for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(page) < len(listed),
    }


def _not_found(name: str) -> APIError:
    return APIError(404, f"Response with id {quote(name)} not found.", code="response_not_found")
