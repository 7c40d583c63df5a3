"""A request's answers as they come: the engine's events become parts of answers.

Everything here belongs to the event loop.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import structlog

from ...scheduler.errors import ComputationError, RequestError
from ...scheduler.handoff import EventChannel, Handoff
from ...scheduler.order import Priority
from ...scheduler.request import Finished, FinishReason, Request, Started, TokenEvent
from ...scheduler.times import Times
from ..errors import panics_as_errors
from ..observability.metrics import Metrics
from .answer_reader import AnswerReader, Delta
from .request_times import RequestTimes

log = structlog.get_logger()


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class Generation:
    """Reads one request's channel and turns tokens into parts of an answer.

    An async context manager: leaving it cancels the request if it still runs, writes its log line
    and counts it.
    """

    def __init__(
        self,
        request: Request,
        handoff: Handoff,
        reader: AnswerReader,
        metrics: Metrics,
        arrived_at: float,  # on the engine's clock, in seconds
        # counts log-probabilities kept until the answer is sent; raises UnavailableError
        hold_logprobs: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.request = request
        self.reader = reader
        self.cached_tokens = 0  # of the prompt; known when the request has left the queue
        self.finish_reason: FinishReason | None = None
        self.tokens: list[int] = []  # of the answer so far
        self._handoff = handoff
        self._hold_logprobs = hold_logprobs
        self._metrics = metrics
        self._error: Exception | None = None
        self._matched = 0
        self._times = RequestTimes(arrived_at, metrics)
        self._channel: EventChannel | None = None

    async def __aenter__(self) -> Self:
        """Submit the request.

        Raises:
            RetryLaterError: it cannot be taken now.
        """
        self._channel = self._handoff.submit(self.request)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()
        if self.finish_reason is None and isinstance(error, RequestError):
            self.fail(error)
        elif self.finish_reason is None:  # the client left
            self.finish_reason = FinishReason.CANCELLED
        now = self._handoff.clock()
        computed_at = None if self._channel is None else self._channel.finished_at
        self._times.end(now if computed_at is None else computed_at, now)
        self._count()
        self._write_log_line()

    def _count(self) -> None:
        outcome, tenant, usage = str(self.finish_reason), self.request.tenant, self.usage
        self._metrics.requests.labels(outcome).inc()
        tokens = {
            "prompt": usage.prompt_tokens,
            "cached": usage.cached_tokens,
            "generation": usage.completion_tokens,
        }
        self._metrics.tenants.count(tenant, outcome, tokens)
        if (computed := self._computed) is not None:
            self._metrics.tenants.add_waits(tenant, *computed)

    @property
    def usage(self) -> Usage:
        """Tokens of the request so far."""
        prompt, answer = len(self.request.prompt), len(self.tokens)
        return Usage(prompt, self.cached_tokens, answer, self.reader.reasoning_tokens)

    async def next(self) -> list[Delta] | None:
        """Wait for more of the answer; None at the end. Safe to cancel and call again.

        Returns:
            An empty list, once, when the request has left the queue.

        Raises:
            RequestError: the request ended with an error.
        """
        if self._channel is None:
            raise RuntimeError("the generation was not entered")
        while self.finish_reason is None:
            event = await self._channel.get()
            match event:
                case Started():
                    self._matched, self.cached_tokens = event.matched, event.cached
                    self._times.start(event.at)
                    return []
                case TokenEvent():
                    if deltas := self._take(event):
                        return deltas
                case Finished():
                    if event.error is not None:
                        self.fail(event.error)
                        raise event.error
                    self.finish_reason = event.reason
                    return self.reader.flush() or None
        return None

    def _take(self, event: TokenEvent) -> list[Delta]:
        """Count a token and read it; it may end the answer."""
        self._times.add_token(event.at)
        self.tokens.append(event.token)
        if event.logprobs is not None:
            self._hold_logprobs(1 + len(event.logprobs.top))
        try:
            with panics_as_errors():
                deltas = self.reader.push(event.token, event.logprobs)
        except Exception as error:
            failure = ComputationError(f"token {event.token} cannot be decoded: {error}")
            self.fail(failure)
            raise failure from error
        if self.reader.done:
            self.finish_reason = FinishReason.STOP
            self.cancel()  # the request's other answers may go on for long
            deltas += self.reader.flush()
        return deltas

    def cancel(self) -> None:
        """End the answer; the part that has come stays."""
        self._handoff.cancel(self.request.id)

    def fail(self, error: Exception) -> None:
        """Note that the answer ended with an error."""
        self.finish_reason, self._error = FinishReason.ERROR, error

    @property
    def _computed(self) -> tuple[Times, float] | None:
        """The engine's times of the request and when it ended; None if it was never taken."""
        channel = self._channel
        if channel is None or channel.times is None or channel.finished_at is None:
            return None
        return channel.times, channel.finished_at

    def _longest_wait(self) -> dict[str, object]:
        if (computed := self._computed) is None:
            return {"waited_for": None, "waited_s": None}
        times, ended_at = computed
        activity, seconds = times.longest_wait(ended_at) or (None, 0.0)
        return {"waited_for": activity, "waited_s": round(seconds, 3)}

    def _write_log_line(self) -> None:
        usage, priority = self.usage, self.request.priority
        log.info(
            "request",
            request=self.request.id,
            tenant=self.request.tenant,
            conversation=self.request.conversation,
            total=usage.prompt_tokens,
            matched=self._matched,
            cached=usage.cached_tokens,
            left=usage.prompt_tokens - usage.cached_tokens,
            **self._times.log_latencies(),
            out=usage.completion_tokens,
            finish=self.finish_reason,
            **({} if priority is Priority.INTERACTIVE else {"priority": priority.name.lower()}),
            **self._times.log_stages(),
            **self._longest_wait(),
            **({} if self._error is None else {"error": str(self._error)}),
        )


class ChoiceDeltas(NamedTuple):
    """More of one answer: its number, and its deltas; [] when it starts, None when it has ended."""

    choice: int
    deltas: list[Delta] | None


class Generations:
    """Reads all answers of one request as they come: several prompts, several answers of each.

    An async context manager: leaving it ends them all.
    """

    def __init__(
        self,
        answers: list[Generation],  # at least one; those of the first prompt come first
        n: int = 1,  # answers of each prompt
        before_queue: Callable[[], object] = lambda: None,  # called when they are submitted
    ) -> None:
        self.answers = answers
        # called once, in order, when all have ended, before the end is reported
        self.at_end: list[Callable[[], Awaitable[None]]] = []
        self._ending: asyncio.Future[None] | None = None
        self._n = n
        self._before_queue = before_queue
        self._stack = AsyncExitStack()
        self._tasks: dict[asyncio.Task[list[Delta] | None], int] = {}
        self._left = len(answers)

    async def __aenter__(self) -> Self:
        """Submit all requests.

        Raises:
            RetryLaterError: one cannot be taken now; then none is.
        """
        self._before_queue()  # no other request is queued between this and the submissions
        async with AsyncExitStack() as stack:
            for generation in self.answers:
                await stack.enter_async_context(generation)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await self._stack.__aexit__(kind, error, traceback)

    async def next(self) -> ChoiceDeltas | None:
        """Wait for more of any answer; None when all have ended. Safe to cancel and call again.

        Raises:
            RequestError: one of them ended with an error.
        """
        if not self._left:
            if self._ending is None:
                self._ending = asyncio.ensure_future(self._end())
            await asyncio.shield(self._ending)
            return None
        if len(self.answers) == 1:
            return self._noted(0, await self.answers[0].next())
        if not self._tasks:
            for choice in range(len(self.answers)):
                self._await_more(choice)
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        task = done.pop()
        choice = self._tasks.pop(task)
        noted = self._noted(choice, task.result())
        if noted.deltas is not None:
            self._await_more(choice)
        return noted

    async def _end(self) -> None:
        for do in self.at_end:
            await do()

    def _await_more(self, choice: int) -> None:
        self._tasks[asyncio.ensure_future(self.answers[choice].next())] = choice

    def _noted(self, choice: int, deltas: list[Delta] | None) -> ChoiceDeltas:
        self._left -= deltas is None
        return ChoiceDeltas(choice, deltas)

    async def finish(self) -> None:
        """Wait until all answers have ended; their readers then have them."""
        while await self.next() is not None:
            pass

    @property
    def usage(self) -> Usage:
        """Tokens of all answers; each prompt counts once."""
        prompts = [generation.usage for generation in self.answers[:: self._n]]
        every = [generation.usage for generation in self.answers]
        return Usage(
            sum(usage.prompt_tokens for usage in prompts),
            sum(usage.cached_tokens for usage in prompts),
            sum(usage.completion_tokens for usage in every),
            sum(usage.reasoning_tokens for usage in every),
        )

    @property
    def has_logprobs(self) -> bool:
        """True if log-probabilities were asked for, so that the answers are large."""
        return self.answers[0].request.sampling.top_logprobs is not None

    def cancel(self) -> None:
        """End all answers; the parts that have come stay."""
        for generation in self.answers:
            generation.cancel()

    def fail(self, error: Exception) -> None:
        """Note that the answers ended with an error."""
        for generation in self.answers:
            if generation.finish_reason is None:
                generation.fail(error)
