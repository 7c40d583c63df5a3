"""Anthropic's messages."""

from aiohttp import web

from ...protocols.errors import MESSAGES
from ...protocols.messages import CountRequest, MessagesRequest
from ...protocols.messages_answers import MessageAnswers
from .answering import json_response
from .entry import Entry


class MessagesHandlers:
    """Handlers in Anthropic's shapes."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def routes(self) -> list[web.RouteDef]:
        """List what is handled here."""
        return [
            web.post(MESSAGES, self.messages),
            web.post(f"{MESSAGES}/count_tokens", self.count_tokens),
        ]

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/messages`."""
        caller, service, body = await self._entry.read(request, MessagesRequest)
        generations = await service.generate(body, caller)
        answers = MessageAnswers(
            caller.request_id,
            generations,
            service.model_name,
            max_tokens=body.max_tokens,
            shows_thinking=body.shows_thinking,
        )
        return await self._entry.answer(request, generations, answers, stream=body.stream)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """`POST /v1/messages/count_tokens`: how many tokens the prompt has."""
        caller, service, body = await self._entry.read(request, CountRequest, queued=False)
        return json_response({"input_tokens": await service.count_tokens(body, caller)})
