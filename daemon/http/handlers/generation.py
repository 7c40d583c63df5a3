"""Generation: OpenAI's completions, Anthropic's messages, and the tokens of prompts."""

from aiohttp import web

from ...protocols.chat import ChatRequest
from ...protocols.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from ...protocols.errors import MESSAGES
from ...protocols.messages import CountRequest, MessagesRequest
from ...protocols.messages_answers import MessageAnswers
from ...protocols.openai_answers import ChatAnswers, CompletionAnswers, OpenAIAnswers
from ..exchange import EXCHANGE, json_response
from .entry import Entry


class GenerationHandlers:
    """Handlers of prompts; `/v1/responses` has its own."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def routes(self) -> list[web.RouteDef]:
        """List the routes."""
        return [
            web.post("/v1/chat/completions", self.chat_completions),
            web.post("/v1/completions", self.completions),
            web.post(MESSAGES, self.messages),
            web.post(f"{MESSAGES}/count_tokens", self.count_tokens),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
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
        arrival, service, body = await self._entry.read(request, kind)
        generations = await service.generate(body, arrival)
        answers = encoder(
            arrival.request_id,
            generations,
            service.model_name,
            service.fingerprint,
            usage=body.wants_usage,
        )
        return await request[EXCHANGE].answer(generations, answers)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/messages`."""
        arrival, service, body = await self._entry.read(request, MessagesRequest)
        generations = await service.generate(body, arrival)
        answers = MessageAnswers(
            arrival.request_id,
            generations,
            service.model_name,
            max_tokens=body.max_tokens,
            shows_thinking=body.shows_thinking,
        )
        return await request[EXCHANGE].answer(generations, answers)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """`POST /v1/messages/count_tokens`: the number of tokens of the prompt."""
        arrival, service, body = await self._entry.read(request, CountRequest, queued=False)
        return json_response({"input_tokens": await service.count_tokens(body, arrival)})

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /tokenize`: the tokens of a text, or of a conversation with its beginning."""
        arrival, service, body = await self._entry.read(request, TokenizeRequest)
        tokens = await service.tokenize(body, arrival)
        length = {"max_model_len": service.context_length}
        return json_response({"count": len(tokens), **length, "tokens": tokens})

    async def detokenize(self, request: web.Request) -> web.Response:
        """`POST /detokenize`: the text of tokens, special ones by their names."""
        arrival, service, body = await self._entry.read(request, DetokenizeRequest)
        return json_response({"prompt": await service.detokenize(body, arrival)})
