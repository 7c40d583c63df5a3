"""Generation: OpenAI's completions, Anthropic's messages, and the tokens of prompts."""

from aiohttp import web

from ...protocols.chat import ChatRequest
from ...protocols.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from ...protocols.errors import MESSAGES
from ...protocols.messages import CountRequest, MessagesRequest
from ...protocols.messages_answers import MessageAnswers
from ...protocols.openai_answers import ChatAnswers, CompletionAnswers, OpenAIAnswers
from ..exchange import EXCHANGE, json_response
from .entry import ENTRY

routes = web.RouteTableDef()


@routes.post("/v1/chat/completions")
async def _chat_completions(request: web.Request) -> web.StreamResponse:
    return await _complete(request, ChatRequest, ChatAnswers)


@routes.post("/v1/completions")
async def _completions(request: web.Request) -> web.StreamResponse:
    return await _complete(request, CompletionRequest, CompletionAnswers)


async def _complete(
    request: web.Request,
    kind: type[ChatRequest | CompletionRequest],
    encoder: type[OpenAIAnswers],
) -> web.StreamResponse:
    arrival, service, body = await request.app[ENTRY].read(request, kind)
    generations = await service.generate(body, arrival)
    answers = encoder(
        arrival.request_id,
        generations,
        service.model_name,
        service.fingerprint,
        usage=body.wants_usage,
    )
    return await request[EXCHANGE].answer(generations, answers)


@routes.post(MESSAGES)
async def _messages(request: web.Request) -> web.StreamResponse:
    arrival, service, body = await request.app[ENTRY].read(request, MessagesRequest)
    generations = await service.generate(body, arrival)
    answers = MessageAnswers(
        arrival.request_id,
        generations,
        service.model_name,
        max_tokens=body.max_tokens,
        shows_thinking=body.shows_thinking,
    )
    return await request[EXCHANGE].answer(generations, answers)


@routes.post(f"{MESSAGES}/count_tokens")
async def _count_tokens(request: web.Request) -> web.Response:
    arrival, service, body = await request.app[ENTRY].read(request, CountRequest, queued=False)
    return json_response({"input_tokens": await service.count_tokens(body, arrival)})


@routes.post("/tokenize")
async def _tokenize(request: web.Request) -> web.Response:
    """Return the tokens of a text, or of a conversation with its generation prompt."""
    arrival, service, body = await request.app[ENTRY].read(request, TokenizeRequest)
    tokens = await service.tokenize(body, arrival)
    length = {"max_model_len": service.context_length}
    return json_response({"count": len(tokens), **length, "tokens": tokens})


@routes.post("/detokenize")
async def _detokenize(request: web.Request) -> web.Response:
    arrival, service, body = await request.app[ENTRY].read(request, DetokenizeRequest)
    return json_response({"prompt": await service.detokenize(body, arrival)})
