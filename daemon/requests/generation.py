"""One answer as it comes: events of the engine to parts of the answer, on the event loop."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec
import structlog

from ...scheduler.errors import ComputationError, RequestError
from ...scheduler.handoff import EventChannel, Handoff
from ...scheduler.order import Priority
from ...scheduler.request import Finished, FinishReason, Request, Started, TokenEvent
from ...scheduler.times import Times
from ..http.request_times import RequestTimes
from ..observability.metrics import Metrics
from ..panics import panics_as_errors
from .answer_reader import AnswerReader, Delta

log = structlog.get_logger()


class Usage(msgspec.Struct, frozen=True):
    """What one request took, in tokens."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


class Generation:
    """Reads one request's channel and turns tokens into parts of an answer.

    An async context manager: leaving it, however that comes about, cancels what still
    runs, writes the request's log line and counts it.

    Args:
        arrived_at: when the request came, on the engine's clock, in seconds.
        hold_logprobs: counts log-probabilities that are kept until the answer is sent; raises
            `UnavailableError` where there is no room for them.

    Attributes:
        reader: of its tokens; knows what has come so far.
        finish_reason: None until the answer has ended.
        tokens: of the answer so far.
        cached_tokens: of the prompt; 0 until the request has left the queue.
    """

    def __init__(
        self,
        request: Request,
        handoff: Handoff,
        reader: AnswerReader,
        metrics: Metrics,
        arrived_at: float,
        hold_logprobs: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.request = request
        self.reader = reader
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.tokens: list[int] = []
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
        self._handoff.cancel(self.request.id)
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
        """What it has taken so far."""
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
                    self._start(event)
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

    def _start(self, event: Started) -> None:
        self._matched, self.cached_tokens = event.matched, event.cached
        self._times.start(event.at)

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
            self.cancel()  # others of the same request may go on for long
            deltas += self.reader.flush()
        return deltas

    def cancel(self) -> None:
        """End the answer; what has come of it stays."""
        self._handoff.cancel(self.request.id)

    def fail(self, error: Exception) -> None:
        """Note that the answer ended with an error."""
        self.finish_reason, self._error = FinishReason.ERROR, error

    @property
    def _computed(self) -> tuple[Times, float] | None:
        """What the engine did of it, and when that ended; None if it never took it."""
        channel = self._channel
        if channel is None or channel.times is None or channel.finished_at is None:
            return None
        return channel.times, channel.finished_at

    def _longest_wait(self) -> dict[str, object]:
        """What it waited for longest, and for how many seconds."""
        if (computed := self._computed) is None:
            return {"waited_for": None, "waited_s": None}
        times, ended_at = computed
        activity, seconds = times.longest_wait(ended_at) or (None, 0.0)
        return {"waited_for": activity, "waited_s": round(seconds, 3)}

    def _log_priority(self) -> dict[str, str]:
        """Name the priority where it is not everybody's."""
        priority = self.request.priority
        return {} if priority is Priority.INTERACTIVE else {"priority": priority.name.lower()}

    def _write_log_line(self) -> None:
        usage = self.usage
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
            **self._log_priority(),
            **self._times.log_stages(),
            **self._longest_wait(),
            **({} if self._error is None else {"error": str(self._error)}),
        )
