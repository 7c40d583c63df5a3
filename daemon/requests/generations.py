"""All answers of one request: its prompts, and several answers of each."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from .answer_reader import Delta
from .generation import Generation, Usage

if TYPE_CHECKING:
    from collections.abc import Awaitable


class ChoiceDeltas(NamedTuple):
    """More of one answer.

    Attributes:
        choice: its number.
        deltas: what came; empty when it has begun; None when it has ended.
    """

    choice: int
    deltas: list[Delta] | None


class Generations:
    """Reads the answers of one request as they come, whichever comes first.

    An async context manager: leaving it ends them all.

    Args:
        answers: at least one.
        n: answers of each prompt; those of the first prompt come first.
        before_queue: called as they are submitted.

    Attributes:
        answers: by the number of their choice.
        at_end: what is done once, in turn, when all have ended, before anybody hears of it.
    """

    def __init__(
        self,
        answers: list[Generation],
        n: int = 1,
        before_queue: Callable[[], object] = lambda: None,
    ) -> None:
        self.answers = answers
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
        self._before_queue()  # nothing else is queued between this and what follows
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
            await self._end()
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
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._do_at_end())
        await asyncio.shield(self._ending)

    async def _do_at_end(self) -> None:
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
        """What all answers took; each prompt counts once."""
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
        """Whether log-probabilities were asked for, so that the answers are large."""
        return self.answers[0].request.sampling.top_logprobs is not None

    def cancel(self) -> None:
        """End all answers; what has come of them stays."""
        for generation in self.answers:
            generation.cancel()

    def fail(self, error: Exception) -> None:
        """Note that the answers ended with an error."""
        for generation in self.answers:
            if generation.finish_reason is None:
                generation.fail(error)
