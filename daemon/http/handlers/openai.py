"""OpenAI's completions: chat and text."""

from aiohttp import web

from ...protocols.chat import ChatRequest
from ...protocols.completions import CompletionRequest
from ...protocols.openai_answers import ChatAnswers, CompletionAnswers, OpenAIAnswers
from .entry import Entry


class OpenAIHandlers:
    """Handlers below `/v1` in OpenAI's shapes."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def routes(self) -> list[web.RouteDef]:
        """List what is handled here."""
        return [
            web.post("/v1/chat/completions", self.chat_completions),
            web.post("/v1/completions", self.completions),
        ]

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        return await self._complete(request, ChatRequest, ChatAnswers)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        return await self._complete(request, CompletionRequest, CompletionAnswers)

    async def _complete(
        self,
        request: web.Request,
        kind: type[ChatRequest | CompletionRequest],
        encoder: type[OpenAIAnswers],
    ) -> web.StreamResponse:
        caller, service, body = await self._entry.read(request, kind)
        generations = await service.generate(body, caller)
        answers = encoder(
            caller.request_id,
            generations,
            service.model_name,
            service.fingerprint,
            usage=body.wants_usage,
        )
        return await self._entry.answer(request, generations, answers, stream=body.stream)
