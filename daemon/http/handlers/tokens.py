"""Text to tokens and back."""

from aiohttp import web

from ...protocols.completions import DetokenizeRequest, TokenizeRequest
from .answering import json_response
from .entry import Entry


class TokenHandlers:
    """Handlers of `/tokenize` and `/detokenize`."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def routes(self) -> list[web.RouteDef]:
        """List what is handled here."""
        return [
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
        ]

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /tokenize`: the tokens of a text, or of a conversation with its beginning."""
        caller, service, body = await self._entry.read(request, TokenizeRequest)
        tokens = await service.tokenize(body, caller)
        length = {"max_model_len": service.context_length}
        return json_response({"count": len(tokens), **length, "tokens": tokens})

    async def detokenize(self, request: web.Request) -> web.Response:
        """`POST /detokenize`: what tokens write, special ones by their names."""
        caller, service, body = await self._entry.read(request, DetokenizeRequest)
        return json_response({"prompt": await service.detokenize(body, caller)})
