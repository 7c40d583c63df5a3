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
from .entry import ENTRY, Entry

T = TypeVar("T")

MAX_LISTED = 100
_LISTED = 20


routes = web.RouteTableDef()


@routes.post("/v1/responses")
async def _create(request: web.Request) -> web.StreamResponse:
    entry, exchange = request.app[ENTRY], request[EXCHANGE]
    arrival, service, body = await entry.read(request, ResponsesRequest)
    past = await _past(entry, body, arrival)
    turn = ResponseTurn(body, arrival, past, service.model_name, entry.stored())
    running = arrival.tenant, turn.id
    try:
        generations = await service.generate(turn.request, arrival)
        answers = turn.answers(generations)
        entry.turns[running] = turn
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
        entry.turns.pop(running, None)
        turn.leave()


@routes.post("/v1/responses/input_tokens")
async def _input_tokens(request: web.Request) -> web.Response:
    """Count the tokens of a response's prompt."""
    entry = request.app[ENTRY]
    arrival, service, body = await entry.read(request, ResponsesRequest, queued=False)
    past, store = await _past(entry, body, arrival), entry.stored().store
    turn = TurnBody(body=body, tenant=arrival.tenant, past=past, store=store)
    tokens = await service.count_tokens(turn, arrival)
    return json_response({"object": "response.input_tokens", "input_tokens": tokens})


@routes.get("/v1/responses/{id}")
async def _retrieve(request: web.Request) -> web.Response:
    if request.query.get("stream", "false") != "false":
        message = "a stored response cannot be streamed; leave stream out"
        raise APIError(400, message, code="unsupported_parameter", param="stream")
    if (turn := _turn(request)) is not None:
        return json_response(turn.now())
    return json_response(_object(await _look(request, ResponseStore.get)))


@routes.delete("/v1/responses/{id}")
async def _delete(request: web.Request) -> web.Response:
    """Delete a response; of one that is being made, nothing is stored."""
    turn = _turn(request)
    if turn is not None:
        turn.discard()
    elif not await _look(request, ResponseStore.delete):
        raise _not_found(request)
    name = request.match_info["id"]
    return json_response({"id": name, "object": "response", "deleted": True})


@routes.get("/v1/responses/{id}/input_items")
async def _input_items(request: web.Request) -> web.Response:
    turn = _turn(request)
    items = turn.items if turn else await _look(request, ResponseStore.input_items)
    return json_response(_page(items, request.query))


@routes.post("/v1/responses/{id}/cancel")
async def _cancel(request: web.Request) -> web.Response:
    """End a response that is being made."""
    turn = _turn(request)
    if turn is not None and turn.status == "in_progress":
        return json_response(turn.cancel())
    status = turn.status if turn else (await _look(request, ResponseStore.get)).status
    message = f"the response is {status}; only one that is being made can be cancelled"
    raise APIError(400, message)


async def _past(entry: Entry, body: ResponsesRequest, arrival: Arrival) -> Past | None:
    """Find the responses that a body continues; raises as `find_past` does."""
    previous = body.previous_response_id
    turn = entry.turns.get((arrival.tenant, previous or ""))
    if previous is not None and turn is not None and not turn.is_settled:
        raise unfinished(previous, turn.status)
    return await find_past(previous, arrival, entry.stored())


def _turn(request: web.Request) -> ResponseTurn | None:
    """Find a response that is being made; once it is settled, the store has it."""
    entry = request.app[ENTRY]
    turn = entry.turns.get((entry.caller(request).tenant, request.match_info["id"]))
    return None if turn is None or turn.is_settled else turn


async def _look(request: web.Request, find: Callable[[ResponseStore, str, str], T]) -> T:
    """Ask the store for a response; raises an APIError 404 if it is not there."""
    entry, name = request.app[ENTRY], request.match_info["id"]
    tenant = entry.caller(request).tenant
    entry.pool()
    try:
        return await entry.stored().look(lambda store: find(store, tenant, name))
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
