"""What the HTTP handlers stand on: the model's text side, admission, and the crossing."""

from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec import Raw

from ..cachestore.checkpoints import Reason
from ..cachestore.pins import PinDescription
from ..models.loader import LoadedModel
from ..models.text import boundaries
from ..scheduler.admission import Admission
from ..scheduler.errors import UnavailableError
from ..scheduler.handoff import Handoff
from ..scheduler.queue import RETRY_AFTER, ConversationQueue
from ..scheduler.request import Request
from .assembly import Assembly
from .bodies import Share
from .cache_desk import CacheDesk
from .generation import Generation
from .metrics import Metrics
from .openai_requests import ChatRequest, CompletionRequest, GenerationFields, check_tokens
from .pin_requests import PinRequest
from .pressure import PressureWatch
from .workers import Check, Workers

_TOKEN_BYTES = 40  # of a prompt's token while its request waits: an int, and its places in lists


class Caller(NamedTuple):
    """Whose request it is.

    Attributes:
        request_id: what it is called, here and in the answer's headers.
        tenant: who sent it.
        conversation: the name it gave, or None for a conversation of its own.
        arrived_at: when, on the engine's clock, in seconds.
        share: what its body, and then its prompt, hold of the budget of bodies.
    """

    request_id: str
    tenant: str
    conversation: str | None
    arrived_at: float
    share: Share


class Rendered(NamedTuple):
    """A prompt's tokens, and the offsets in it that a next turn keeps."""

    prompt: list[int]
    boundaries: list[tuple[int, Reason]]


class Service:
    """Turns decoded bodies into generations, for one loaded model."""

    def __init__(
        self,
        loaded: LoadedModel,
        assembly: Assembly,
        queue: ConversationQueue,
        handoff: Handoff,
        cache: CacheDesk,
        pressure: PressureWatch,
        *,
        exact: bool,
        request_timeout: float,
    ) -> None:
        self.model_name = loaded.name
        self.context_length = assembly.context_length
        self.fingerprint = loaded.fingerprint
        self.weight_bytes = loaded.weight_bytes
        self.batches = assembly.forward.batches
        self.one_by_one = assembly.forward.one_by_one
        self.exact = exact
        self.vocab_size = loaded.text.vocab_size
        self.engine = assembly.engine
        self.queue = queue
        self.cache = cache
        self.pressure = pressure
        self.disk = assembly.pager
        self.metrics = Metrics(self.engine.statistics, lambda: len(queue), assembly.pager)
        self._text = loaded.text
        self._stack = loaded.stack
        self._handoff = handoff
        self._admission = Admission(assembly.context_length, assembly.bound)
        self._request_timeout = request_timeout
        self.workers = Workers(queue.limit, request_timeout, lambda: len(queue))

    async def chat(self, body: ChatRequest, caller: Caller) -> Generation:
        """Admit a chat request; entering the result submits it.

        Raises:
            APIError: a field or a message is of no use to this model.
            TemplateError: the chat template refuses the messages.
            InvalidRequestError: the prompt is empty or too long.
        """
        return await self._admit(body, caller, lambda check: self._render_body(body, check))

    async def completion(self, body: CompletionRequest, caller: Caller) -> Generation:
        """Admit a text completion; entering the result submits it.

        Raises:
            APIError: a field is of no use to this model.
            InvalidRequestError: the prompt is empty or too long.
        """
        return await self._admit(body, caller, lambda check: self._encode_body(body, check))

    async def pin(self, body: PinRequest, caller: Caller) -> PinDescription:
        """Keep a system prompt, computed now if need be, or a conversation.

        Raises:
            PinError: it cannot be kept.
            RequestError: the prompt could not be computed.
        """
        if body.conversation is not None:
            return await self.cache.pin_conversation(caller.tenant, body.conversation)
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": body.system},
            {"role": "user", "content": "1"},
        ]
        rendered = await self.workers.run(
            lambda check: self._render_system(messages, check), caller.share.nbytes
        )
        warm_up = CompletionRequest(prompt=Raw(b'""'), max_tokens=1)
        generation = await self._admit(warm_up, caller, lambda _: rendered)
        async with generation:
            await generation.whole()
        end = next((at for at, why in rendered.boundaries if why is Reason.SYSTEM), None)
        prompt = rendered.prompt[:end]
        return await self.cache.pin(caller.tenant, body.name or "", prompt)

    async def _admit(
        self, body: GenerationFields, caller: Caller, encode: Callable[[Check], Rendered]
    ) -> Generation:
        sampling = body.sampling(self.vocab_size)
        prompt, ends = await self.workers.run(encode, caller.share.nbytes)
        body.release()
        caller.share.resize(len(prompt) * _TOKEN_BYTES)
        request = Request(
            id=caller.request_id,
            tenant=caller.tenant,
            conversation=caller.conversation or caller.request_id,
            prompt=prompt,
            max_tokens=self._admission.answer_length(len(prompt), body.answer_limit),
            sampling=sampling,
            deadline=caller.arrived_at + self._request_timeout,
            boundaries=ends,
        )
        return Generation(
            request,
            self._handoff,
            self._text,
            body.stops,
            self.metrics,
            caller.arrived_at,
        )

    # -- on the workers' threads ---------------------------------------------------------

    def _encode_body(self, body: CompletionRequest, check: Check) -> Rendered:
        """Encode a text completion's prompt, or look at its tokens."""
        self._admission.check_text(body.least_characters, self._text.longest_token)
        prompt = body.single_prompt()
        check()
        if isinstance(prompt, str):
            return Rendered(self._encoded(prompt), [])
        if prompt:  # an empty one is refused in other words
            self._admission.answer_length(len(prompt), None)
        check_tokens(prompt, self.vocab_size)
        return Rendered(prompt, [])

    def _render_body(self, body: ChatRequest, check: Check) -> Rendered:
        """Encode a conversation; find its boundaries if the model needs checkpoints there."""
        messages = body.template_messages(check)
        self._check_messages(messages)
        text = self._text.render_chat(messages)
        check()
        prompt = self._encoded(text, special_tokens=False)
        if not self._stack.has_checkpoints:
            return Rendered(prompt, [])
        check()
        found = boundaries.find(self._text, messages, prompt)
        system = [] if found.system is None else [(found.system, Reason.SYSTEM)]
        return Rendered(prompt, [*system, *((end, Reason.MESSAGE) for end in found.messages)])

    def _render_system(self, messages: list[dict[str, Any]], check: Check) -> Rendered:
        self._check_messages(messages)
        prompt = self._encoded(self._text.render_chat(messages), special_tokens=False)
        check()
        system = boundaries.find(self._text, messages, prompt).system
        return Rendered(prompt, [] if system is None else [(system, Reason.SYSTEM)])

    def _check_messages(self, messages: list[dict[str, Any]]) -> None:
        """Refuse messages that cannot fit, before a template makes one text of them."""
        characters = sum(len(message["content"]) for message in messages)
        self._admission.check_text(characters, self._text.longest_token)

    def _encoded(self, text: str, *, special_tokens: bool = True) -> list[int]:
        self._admission.check_text(len(text), self._text.longest_token)
        return self._text.encode(text, special_tokens=special_tokens)

    def models(self) -> list[dict[str, Any]]:
        """Describe the model as both OpenAI's and Anthropic's list of models do."""
        return [
            {
                "id": self.model_name,
                "object": "model",
                "created": 0,
                "owned_by": "umbel",
                "type": "model",
                "display_name": self.model_name,
                "created_at": "1970-01-01T00:00:00Z",
                "max_model_len": self.context_length,
                "context_length": self.context_length,
            }
        ]


def still_loading() -> UnavailableError:
    """What a request hears that comes before the model does."""
    return UnavailableError("the model is still loading", retry_after=RETRY_AFTER)
