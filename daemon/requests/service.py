"""What the HTTP handlers stand on: the model's text side, admission, and the crossing."""

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
from ..http.bodies import TOKEN_BYTES, Share
from ..http.failures import APIError
from ..identity.caller import Caller
from ..identity.conversations import PARALLEL, conversation_of_choice, place_of
from ..identity.operators import refuse_tenants
from ..models.assembly import Assembly
from ..models.pressure import PressureWatch
from ..observability.cache_admin import CacheAdmin
from ..observability.metrics import Metrics
from ..observability.pin_requests import PinRequest
from ..panics import panics_as_errors
from ..protocols.completions import DetokenizeRequest, TokenizeRequest
from ..protocols.generation_request import GenerationBody, GenerationRequest
from .answer_reader import AnswerReader
from .generation import Generation
from .generations import Generations
from .logprobs import ENTRY_BYTES
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
        """Bound what comes from now on otherwise."""
        self.queue.limit = max_waiting
        self._request_timeout = request_timeout

    async def generate(self, body: GenerationBody, caller: Caller) -> Generations:
        """Admit a request of any protocol; entering the result submits it.

        Raises:
            APIError: a field or a message is of no use to this model.
            TemplateError: the chat template refuses the messages.
            InvalidRequestError: a prompt is empty or too long.
        """
        prepared = await self._prepare(body, caller)
        named = caller.conversation or body.conversation_name  # of a stored response, if of any
        session = caller.session or body.session_name
        place = place_of(named, session, prepared.request.prompts[0])
        kept = body.kept_bytes
        body.release()
        await self._turn(caller)
        return self._admit(
            prepared, caller._replace(conversation=place.conversation, unit=place.unit), kept
        )

    async def _turn(self, caller: Caller) -> None:
        """Wait for those of its conversation, or its session, that came before it."""
        if caller.arrival is None:
            return
        try:
            async with asyncio.timeout(caller.wait.left(self._request_timeout)):
                await caller.arrival.turn()
        except TimeoutError as error:
            message = "requests that came before it in its conversation were not read in time"
            raise DeadlineExceededError(message) from error

    async def _prepare(self, body: GenerationBody, caller: Caller) -> Prepared:
        author = Author(caller.tenant, caller.request_id)
        return await self._work(lambda check: self._prompts.prepare(body, author, check), caller)

    async def _work(self, work: Callable[[Check], T], caller: Caller) -> T:
        """Run a request's work on a worker's thread; see `Workers.run`."""
        return await self.workers.run(work, caller.share.nbytes, caller.tenant, caller.wait)

    async def count_tokens(self, body: GenerationBody, caller: Caller) -> int:
        """Count the tokens of a request's prompts; nothing is computed.

        Raises:
            APIError: a field or a message is of no use to this model.
            TemplateError: the chat template refuses the messages.
            ContextLengthExceededError: a prompt is too long to be tokenised.
        """
        prepared = await self._prepare(body, caller)
        body.release()
        return sum(len(rendered.prompt) for rendered in prepared.prompts)

    async def tokenize(self, body: TokenizeRequest, caller: Caller) -> list[int]:
        """Say which tokens a prompt has.

        Raises:
            APIError: a field or a message is of no use to this model.
            TemplateError: the chat template refuses the messages.
            ContextLengthExceededError: it is far beyond the context.
        """

        def tokens(check: Check) -> list[int]:
            prompt = body.prompt_to_read(check)
            return self._prompts.tokens(prompt, special_tokens=body.special_tokens)

        return await self._work(tokens, caller)

    async def detokenize(self, body: DetokenizeRequest, caller: Caller) -> str:
        """Say what tokens write.

        Raises:
            APIError: there is no such token, or there are too many.
        """
        return await self._work(
            lambda check: self._prompts.text(body.tokens_to_read(), check), caller
        )

    async def pin(self, body: PinRequest, caller: Caller) -> PinDescription:
        """Keep a system prompt, computed now if need be, or a conversation.

        Raises:
            APIError: it is to be shared, and somebody else than the operator asks.
            PinError: it cannot be kept.
            RequestError: the prompt could not be computed.
        """
        if body.shared:
            refuse_tenants(operator=caller.operator, what="share a prompt with all tenants")
            caller = caller._replace(tenant=SHARED)
        if body.conversation is not None:
            return await self.cache.pin_conversation(
                caller.tenant, body.conversation, operator=caller.operator
            )
        text = body.system or ""
        rendered, end = await self._work(
            lambda check: self._prompts.system_prompt(text, check), caller
        )
        if body.shared and end is None:
            raise PinError("the model's chat template does not say where a system prompt ends")
        warm_up = GenerationRequest(
            prompts=[rendered.prompt], sampling=SamplingParams(seed=0), max_tokens=1
        )
        async with self._admit(Prepared(warm_up, [rendered]), caller) as generations:
            await generations.finish()
        return await self.cache.pin(
            caller.tenant, body.name or "", rendered.prompt[:end], operator=caller.operator
        )

    def _admit(self, prepared: Prepared, caller: Caller, kept: int = 0) -> Generations:
        """Hold a prompt's bytes until its answers have ended, and make what reads them."""
        wanted, prompts = prepared
        tokens = sum(len(prompt.prompt) for prompt in prompts)
        caller.share.resize(kept + tokens * TOKEN_BYTES)
        hold_logprobs = partial(_hold_logprobs, caller.share)
        answers = [(prompt, number) for prompt in prompts for number in range(wanted.n)]
        made = [
            self._generation(wanted, prompt, caller, choice, number, hold_logprobs)
            for choice, (prompt, number) in enumerate(answers)
        ]
        generations = Generations(made, wanted.n, caller.queued)
        for (prompt, _), generation in zip(answers, made, strict=True):
            generations.at_end.append(partial(self._remember, prompt, generation))
        return generations

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

    def _generation(
        self,
        wanted: GenerationRequest,
        rendered: Rendered,
        caller: Caller,
        choice: int,
        number: int,
        hold_logprobs: Callable[[int], None],
    ) -> Generation:
        suffix = f".{choice}" if choice else ""
        seed = (wanted.sampling.seed + number) % 2**64
        request = Request(
            id=caller.request_id + suffix,
            tenant=caller.tenant,
            conversation=conversation_of_choice(caller.conversation or caller.request_id, choice),
            prompt=rendered.prompt,
            max_tokens=self._admission.answer_length(len(rendered.prompt), wanted.max_tokens),
            sampling=msgspec.structs.replace(wanted.sampling, seed=seed),
            deadline=caller.wait.deadline(self._request_timeout),
            boundaries=list(rendered.boundaries),
            grammar=rendered.grammar,
            unit=caller.unit,
            parallel=1 if caller.unit is None else PARALLEL,
            priority=caller.priority,
            before=caller.arrival.seconds() if caller.arrival and not choice else {},
            placed=caller.wait.has_place,
        )
        logprobs = wanted.sampling.top_logprobs is not None
        reader = AnswerReader(
            self._text,
            rendered.parser(),
            wanted.stops,
            logprobs=logprobs,
            markup=rendered.markup,
            continues=rendered.continues,
        )
        return Generation(
            request,
            self._handoff,
            reader,
            self.metrics,
            caller.arrived_at,
            hold_logprobs,
        )


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
    """What a request hears that comes before the model does."""
    return UnavailableError("the model is still loading", retry_after=RETRY_AFTER)
