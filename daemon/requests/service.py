"""One loaded model's service: it turns decoded bodies into generations, tokens and pins."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
import structlog

from ...cachestore.errors import PinError
from ...cachestore.pins import PinDescription
from ...cachestore.tries import SHARED
from ...models.load.loader import LoadedModel
from ...models.params import SamplingParams
from ...scheduler.errors import DeadlineExceededError, UnavailableError
from ...scheduler.handoff import Handoff
from ...scheduler.limits import RETRY_AFTER, Admission
from ...scheduler.queue import ConversationQueue
from ...scheduler.request import Request
from ..errors import panics_as_errors
from ..http.bodies import TOKEN_BYTES, Share
from ..http.failures import APIError
from ..identity.conversations import PARALLEL, Place, conversation_of_choice, place_of
from ..identity.tenants import refuse_tenants
from ..models.assembly import Assembly
from ..models.pressure import PressureWatch
from ..observability.cache_admin import CacheAdmin, PinRequest
from ..observability.metrics import Metrics
from ..protocols.completions import DetokenizeRequest, TokenizeRequest
from ..protocols.generation_request import GenerationBody, GenerationRequest
from .answer_reader import ENTRY_BYTES, AnswerReader
from .arrivals import Arrival
from .generation import Generation, Generations
from .prompts import Author, Prepared, PromptReader, Rendered
from .workers import Check, Workers

T = TypeVar("T")

_FEW_TOKENS = 512  # that are read again on the event loop: about 5 ms

log = structlog.get_logger()


class Service:
    """Turns decoded bodies into generations, for one loaded model."""

    def __init__(
        self,
        loaded: LoadedModel,
        assembly: Assembly,
        queue: ConversationQueue,
        handoff: Handoff,
        cache: CacheAdmin,
        pressure: PressureWatch,
        workers: Workers,
        metrics: Metrics,
        *,
        exact: bool,
        request_timeout: float,
    ) -> None:
        self.model_name = loaded.name
        self.context_length = assembly.context_length
        self.fingerprint = loaded.fingerprint
        self.weight_bytes = loaded.weight_bytes
        self.batches = assembly.runner.batches
        self.one_by_one = assembly.runner.one_by_one
        self.exact = exact
        self.vocab_size = loaded.text.vocab_size
        self.engine = assembly.engine
        self.queue = queue
        self.cache = cache
        self.pressure = pressure
        self.disk = assembly.pager
        self.metrics = metrics
        metrics.attach(self.engine.statistics, lambda: len(queue), assembly.pager)
        self._text = loaded.text
        self._handoff = handoff
        self._admission = Admission(assembly.context_length, assembly.bound)
        self._prompts = PromptReader(loaded, self._admission)
        self._request_timeout = request_timeout
        self.workers = workers

    def set_bounds(self, *, max_waiting: int, request_timeout: float) -> None:
        """Change the bounds of later requests."""
        self.queue.limit = max_waiting
        self._request_timeout = request_timeout

    async def generate(self, body: GenerationBody, arrival: Arrival) -> Generations:
        """Admit a request of any protocol; entering the result submits it.

        Raises:
            APIError: a field or a message is of no use to this model.
            TemplateError: the chat template refuses the messages.
            InvalidRequestError: a prompt is empty or too long.
        """
        prepared = await self._prepare(body, arrival)
        # A stored response may name the conversation, which only the whole body knows.
        named = arrival.conversation or body.conversation_name
        session = arrival.caller.session or body.session_name
        place = place_of(named, session, prepared.request.prompts[0])
        kept = body.kept_bytes
        body.release()
        try:
            async with asyncio.timeout(arrival.wait.left(self._request_timeout)):
                await arrival.wait_for_earlier()
        except TimeoutError as error:
            message = "requests that came before it in its conversation were not read in time"
            raise DeadlineExceededError(message) from error
        return self._admit(prepared, arrival, place, kept=kept)

    async def _prepare(self, body: GenerationBody, arrival: Arrival) -> Prepared:
        author = Author(arrival.tenant, arrival.request_id)
        return await self._work(lambda check: self._prompts.prepare(body, author, check), arrival)

    async def _work(self, work: Callable[[Check], T], arrival: Arrival) -> T:
        """Run a request's work on a worker's thread; see `Workers.run`."""
        return await self.workers.run(work, arrival.share.nbytes, arrival.tenant, arrival.wait)

    async def count_tokens(self, body: GenerationBody, arrival: Arrival) -> int:
        """Count the tokens of a request's prompts; no answer is computed.

        Raises:
            APIError: a field or a message is of no use to this model.
            TemplateError: the chat template refuses the messages.
            ContextLengthExceededError: a prompt is too long to be tokenised.
        """
        prepared = await self._prepare(body, arrival)
        body.release()
        return sum(len(rendered.prompt) for rendered in prepared.prompts)

    async def tokenize(self, body: TokenizeRequest, arrival: Arrival) -> list[int]:
        """Return a prompt's tokens.

        Raises:
            APIError: a field or a message is of no use to this model.
            TemplateError: the chat template refuses the messages.
            ContextLengthExceededError: it is far beyond the context.
        """

        def tokens(check: Check) -> list[int]:
            prompt = body.prompt_to_read(check)
            return self._prompts.tokens(prompt, special_tokens=body.special_tokens)

        return await self._work(tokens, arrival)

    async def detokenize(self, body: DetokenizeRequest, arrival: Arrival) -> str:
        """Return the text of tokens; raises APIError for a token that does not exist."""
        return await self._work(
            lambda check: self._prompts.text(body.tokens_to_read(), check), arrival
        )

    async def pin(self, body: PinRequest, arrival: Arrival) -> PinDescription:
        """Keep a system prompt, computed now if need be, or a conversation.

        Raises:
            APIError: it is to be shared, and the caller is not the operator.
            PinError: it cannot be kept.
            RequestError: the prompt could not be computed.
        """
        tenant, operator = arrival.tenant, arrival.caller.operator
        if body.shared:
            refuse_tenants(operator=operator, what="share a prompt with all tenants")
            tenant = SHARED
        if body.conversation is not None:
            return await self.cache.pin_conversation(tenant, body.conversation, operator=operator)
        text = body.system or ""
        rendered, end = await self._work(
            lambda check: self._prompts.system_prompt(text, check), arrival
        )
        if body.shared and end is None:
            raise PinError("the model's chat template does not say where a system prompt ends")
        warm_up = GenerationRequest(
            prompts=[rendered.prompt], sampling=SamplingParams(seed=0), max_tokens=1
        )
        prepared, place = Prepared(warm_up, [rendered]), Place(arrival.conversation)
        async with self._admit(prepared, arrival, place, tenant=tenant) as generations:
            await generations.finish()
        return await self.cache.pin(
            tenant, body.name or "", rendered.prompt[:end], operator=operator
        )

    def _admit(
        self,
        prepared: Prepared,
        arrival: Arrival,
        place: Place,
        *,
        kept: int = 0,
        tenant: str | None = None,
    ) -> Generations:
        """Hold a prompt's bytes until its answers have ended, and make their generations.

        Args:
            prepared: the request.
            arrival: its sender and its limits.
            place: in the order of its tenant's.
            kept: bytes of the body that stay.
            tenant: under which it runs; None for its sender.
        """
        wanted, prompts = prepared
        tokens = sum(len(prompt.prompt) for prompt in prompts)
        arrival.share.resize(kept + tokens * TOKEN_BYTES)
        tenant = arrival.tenant if tenant is None else tenant
        answers = [(prompt, number) for prompt in prompts for number in range(wanted.n)]
        made = []
        for choice, (prompt, number) in enumerate(answers):
            request = self._request(wanted, prompt, arrival, place, tenant, choice, number)
            made.append(self._generation(wanted, prompt, arrival, request))
        generations = Generations(made, wanted.n, arrival.queue)
        for (prompt, _), generation in zip(answers, made, strict=True):
            generations.at_end.append(partial(self._remember, prompt, generation))
        return generations

    def _request(
        self,
        wanted: GenerationRequest,
        rendered: Rendered,
        arrival: Arrival,
        place: Place,
        tenant: str,
        choice: int,
        number: int,
    ) -> Request:
        """Make the request of one answer: `choice` of all, `number` of its prompt's."""
        name = place.conversation or arrival.request_id
        seed = (wanted.sampling.seed + number) % 2**64
        return Request(
            id=arrival.request_id + (f".{choice}" if choice else ""),
            tenant=tenant,
            conversation=conversation_of_choice(name, choice),
            prompt=rendered.prompt,
            max_tokens=self._admission.answer_length(len(rendered.prompt), wanted.max_tokens),
            sampling=msgspec.structs.replace(wanted.sampling, seed=seed),
            deadline=arrival.wait.deadline(self._request_timeout),
            boundaries=list(rendered.boundaries),
            grammar=rendered.grammar,
            unit=place.unit,
            parallel=1 if place.unit is None else PARALLEL,
            priority=arrival.priority,
            before={} if choice else arrival.seconds(),
            placed=arrival.wait.has_place,
        )

    def _generation(
        self, wanted: GenerationRequest, rendered: Rendered, arrival: Arrival, request: Request
    ) -> Generation:
        reader = AnswerReader(
            self._text,
            rendered.parser(),
            wanted.stops,
            logprobs=wanted.sampling.top_logprobs is not None,
            markup=rendered.markup,
            continues=rendered.continues,
        )
        hold_logprobs = partial(_hold_logprobs, arrival.share)
        arrived_at = arrival.wait.arrived_at
        return Generation(request, self._handoff, reader, self.metrics, arrived_at, hold_logprobs)

    async def _remember(self, rendered: Rendered, generation: Generation) -> None:
        """Keep an answer for its next turn, which may be asked for as soon as this one ends."""
        tokens, remember = generation.tokens, rendered.remember
        if remember is None or not tokens or generation.reader.stop_sequence is not None:
            return
        answer = generation.reader.collected()
        try:
            if len(tokens) <= _FEW_TOKENS:
                with panics_as_errors():
                    remember(tokens, answer)
            else:
                tenant = generation.request.tenant
                await self.workers.run(
                    lambda _: remember(tokens, answer), len(tokens), tenant, admitted=True
                )
        except Exception as error:  # noqa: BLE001  (the answer is complete, and must arrive)
            log.warning("answer not remembered", request=generation.request.id, reason=str(error))


def _hold_logprobs(share: Share, number: int) -> None:
    """Count more log-probabilities to a request's share of the budget of bodies."""
    try:
        share.resize(share.nbytes + number * ENTRY_BYTES)
    except (APIError, UnavailableError) as error:
        message = (
            "the log-probabilities of this answer take more memory than body_bytes has room for; "
            "ask for fewer of them, or for a shorter answer"
        )
        raise UnavailableError(message, retry_after=RETRY_AFTER) from error


def still_loading() -> UnavailableError:
    """Make the error of a request that comes before the model is loaded."""
    return UnavailableError("the model is still loading", retry_after=RETRY_AFTER)
