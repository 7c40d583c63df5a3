"""The list of models: one entry for the model, and one for each of its aliases."""

from typing import Any

from aiohttp import web

from ...models.slot import ModelSlot
from ...quoting import quote
from ..failures import APIError
from .answering import json_response
from .entry import Entry

_LONGEST_PAGE = 1000


class ModelHandlers:
    """Handlers below `/v1/models`, in the shapes of OpenAI's and Anthropic's SDKs at once."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def routes(self) -> list[web.RouteDef]:
        """List what is handled here."""
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:[^/].*[^/]|[^/]}", self.model),
        ]

    async def models(self, request: web.Request) -> web.Response:
        """`GET /v1/models`: all names, or a page of them as Anthropic's SDK asks for it."""
        models = self._names(request)
        page, more = _page(list(models), request)
        return json_response(
            {
                "object": "list",
                "data": [_described(name, models[name]) for name in page],
                "has_more": more,
                "first_id": page[0] if page else None,
                "last_id": page[-1] if page else None,
            }
        )

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{name}`."""
        name = request.match_info["name"]
        slot = self._entry.find(name, self._entry.caller(request).tenant)
        shown = name if name in self._names(request) else slot.name
        return json_response(_described(shown, slot))

    def _names(self, request: web.Request) -> dict[str, ModelSlot]:
        """All names that the caller may use, each with its model."""
        tenant = self._entry.tenant(self._entry.caller(request).tenant)
        return self._entry.pool().names(tenant.models)


def _described(name: str, slot: ModelSlot) -> dict[str, Any]:
    """Describe a model under one of its names; before it was loaded its context is not known."""
    context = slot.context_length
    known = ("max_input_tokens", "max_tokens", "max_model_len", "context_length")
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "umbel",
        "type": "model",
        "display_name": slot.name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        **({} if context is None else dict.fromkeys(known, context)),
    }


def _page(names: list[str], request: web.Request) -> tuple[list[str], bool]:
    """Choose the names that are asked for, and say whether there are more in that direction.

    Raises:
        APIError: 400, the query is of no use.
    """
    after, before = _place(names, request, "after_id"), _place(names, request, "before_id")
    found = names[0 if after is None else after + 1 : before]
    limit = _limit(request)
    if after is None and before is not None:
        return found[-limit:], len(found) > limit
    return found[:limit], len(found) > limit


def _place(names: list[str], request: web.Request, key: str) -> int | None:
    if key not in request.query:
        return None
    name = request.query[key]
    if name not in names:
        raise APIError(400, f"{key} is {quote(name)}, which is not in the list", param=key)
    return names.index(name)


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(_LONGEST_PAGE))
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else 0  # noqa: PLR2004
    if not 1 <= number <= _LONGEST_PAGE:
        message = f"limit is {quote(text)}; send a number from 1 to {_LONGEST_PAGE}"
        raise APIError(400, message, param="limit")
    return number
