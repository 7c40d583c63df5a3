"""Masks are computed on other threads, waited for within a bound, and never overruled."""

import gc
import threading
import time

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from umbel.models.errors import MatcherError
from umbel.models.params import Mask
from umbel.scheduler import masks
from umbel.scheduler.engine import Engine
from umbel.scheduler.masks import MaskPool
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Event, Finished, FinishReason, TokenEvent
from umbel.scheduler.sequence import Sequence

from ..fakes import PATIENCE, VOCABULARY, FakeClock, FakeRunner, make_request, no_reuse


class Counting:
    """Allows 1, then 2, and so on up to 3, and is complete behind it.

    Attributes:
        threads: the names of those it was used on.
        gate: masks wait for it.
    """

    def __init__(self) -> None:
        self.taken = 0
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def matcher(self) -> "Counting":
        """It is its own grammar."""
        return self

    @property
    def is_complete(self) -> bool:
        """After three tokens."""
        return self.taken == 3

    def consume(self, token: int) -> None:
        """Count."""
        self.threads.add(threading.current_thread().name)
        assert token == self.taken + 1
        self.taken += 1

    def mask(self) -> Mask:
        """The next number's bit."""
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(PATIENCE)
        return np.array([1 << (self.taken + 1), 0], np.uint32)


def test_an_answer_is_followed_on_other_threads() -> None:
    """Each token's mask comes after it; behind the last there is none."""
    grammar = Counting()
    constraint = MaskPool().constrain(grammar)
    for token in (1, 2, 3):
        assert constraint.mask is not None
        assert constraint.mask.tolist() == [1 << token, 0]
        constraint.take(token, ends=False)
    assert constraint.mask is None
    assert all(name.startswith("masks") for name in grammar.threads)


@pytest.mark.parametrize(("token", "ends"), [(2, False), (40, False), (0, True)])
def test_what_is_not_allowed_is_not_taken(token: int, *, ends: bool) -> None:
    """A token, or an end, that came in spite of the mask is an error, and is not followed."""
    grammar = Counting()
    constraint = MaskPool().constrain(grammar)
    with pytest.raises(MatcherError, match="no probability"):
        constraint.take(token, ends=ends)
    assert grammar.taken == 0


def test_a_mask_that_does_not_come_is_waited_for_within_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is an error in words then; whether it is known is said at once."""
    monkeypatch.setattr(masks, "_PATIENCE", 0.05)
    grammar = Counting()
    grammar.gate.clear()
    constraint = MaskPool().constrain(grammar)
    try:
        assert not constraint.is_known(0.0)
        with pytest.raises(TimeoutError, match="the grammar's mask took over"):
            _ = constraint.mask
    finally:
        grammar.gate.set()
    assert constraint.is_known(PATIENCE)
    assert constraint.mask is not None


class Failing(Counting):
    """Allows any token; what follows the `last` one cannot be computed."""

    def __init__(self, last: int, error: BaseException) -> None:
        super().__init__()
        self._last = last
        self._error = error

    def consume(self, _token: int) -> None:
        """Count."""
        self.taken += 1

    @property
    def is_complete(self) -> bool:
        """Never."""
        return False

    def mask(self) -> Mask:
        """Everything, or the fault."""
        if self.taken == self._last:
            raise self._error
        return np.full(VOCABULARY // 32 + 1, 0xFFFFFFFF, np.uint32)


@pytest.mark.parametrize("error", [MatcherError("too complex"), BaseException("a panic")])
def test_a_mask_that_nothing_is_chosen_with_fails_no_answer(error: BaseException) -> None:
    """An answer that `max_tokens` ends is whole, whatever comes of the mask behind it."""
    runner, queue, told = FakeRunner(), ConversationQueue(1), list[Event]()
    engine = Engine(
        *no_reuse(runner),
        queue,
        lambda events: told.extend(event for _, event in events),
        eos_ids=frozenset(),
        prefill_chunk=4,
        max_batch=1,
        clock=FakeClock(),
    )
    for most, end in ((3, FinishReason.LENGTH), (4, FinishReason.ERROR)):
        request = make_request("req-1", max_tokens=most)
        request = msgspec.structs.replace(request, grammar=Failing(3, error))
        queue.put(Sequence(request))
        with capture_logs():
            while engine.step():
                pass
        assert isinstance(told[-1], Finished)
        assert told[-1].reason is end
        assert sum(isinstance(event, TokenEvent) for event in told) == 3
        told.clear()


def test_a_pool_ends_with_its_owner() -> None:
    pool = MaskPool()
    threads = pool._threads
    assert pool.constrain(Counting()).is_known(PATIENCE)
    running = list(threads._threads)
    assert any(thread.is_alive() for thread in running)
    del pool, threads
    until = time.monotonic() + PATIENCE
    while any(thread.is_alive() for thread in running) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in running)
