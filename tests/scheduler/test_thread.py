"""The one thread that touches MLX."""

import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs

from umbel.scheduler.thread import MLXThread, Pace, ThreadStoppedError

from ..fakes import PATIENCE


def nothing() -> None:
    """Do nothing."""


@pytest.fixture
def thread() -> Iterator[MLXThread]:
    """Run a thread for the length of a test."""
    running = MLXThread(on_exit=nothing)
    running.start()
    yield running
    running.stop(PATIENCE)


class Blocker:
    """A call that keeps the thread busy until it is let go."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._go = threading.Event()

    def __call__(self) -> str:
        """Wait to be let go."""
        self._entered.set()
        assert self._go.wait(PATIENCE)
        return "done"

    def wait_entered(self) -> None:
        """Wait until the thread is inside the call."""
        assert self._entered.wait(PATIENCE)

    def let_go(self) -> None:
        """Let the call return."""
        self._go.set()


class TestCalls:
    """Submitting work and waiting for it."""

    def test_calls_run_in_order_on_the_one_thread(self, thread: MLXThread) -> None:
        ran: list[tuple[int, int]] = []

        def note(number: int) -> int:
            ran.append((number, threading.get_ident()))
            return number * 2

        futures = [thread.submit(note, number) for number in range(100)]
        assert [future.result(PATIENCE) for future in futures] == [n * 2 for n in range(100)]
        assert [number for number, _ in ran] == list(range(100))
        (ident,) = {ident for _, ident in ran}
        assert ident != threading.get_ident()

    def test_calls_of_each_caller_stay_in_order(self, thread: MLXThread) -> None:
        """Callers on several threads do not reorder each other's calls."""
        ran: list[tuple[int, int]] = []

        def submit(caller: int) -> None:
            for number in range(200):
                thread.submit(ran.append, (caller, number))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(submit, range(4)))
        thread.submit(nothing).result(PATIENCE)
        for caller in range(4):
            assert [n for c, n in ran if c == caller] == list(range(200))

    def test_arguments_reach_the_call(self, thread: MLXThread) -> None:
        """Positional and keyword arguments are passed on."""
        assert thread.submit(int, "ff", base=16).result(PATIENCE) == 255

    def test_calls_made_before_the_start_wait_for_it(self) -> None:
        """Work can be handed over while the daemon is still being put together."""
        thread = MLXThread(on_exit=nothing)
        future = thread.submit(lambda: "late")
        assert not thread._thread.is_alive()
        thread.start()
        assert future.result(PATIENCE) == "late"
        thread.stop(PATIENCE)

    @pytest.mark.parametrize("error", [ValueError("a"), SystemExit(3), KeyboardInterrupt()])
    def test_a_failing_call_fails_alone(self, thread: MLXThread, error: BaseException) -> None:
        """Whatever a call raises reaches its caller, and the next call runs."""

        def fail() -> None:
            raise error

        failing, fine = thread.submit(fail), thread.submit(lambda: "fine")
        assert failing.exception(PATIENCE) is error
        assert fine.result(PATIENCE) == "fine"
        with pytest.raises(type(error)):
            thread.submit(fail).result(PATIENCE)
        assert thread._thread.is_alive()

    def test_a_cancelled_call_does_not_run(self, thread: MLXThread) -> None:
        """A future cancelled in time is skipped; its neighbours are served."""
        blocker, ran = Blocker(), list[str]()
        thread.submit(blocker)
        cancelled, kept = thread.submit(ran.append, "cancelled"), thread.submit(ran.append, "kept")
        assert cancelled.cancel()
        blocker.let_go()
        kept.result(PATIENCE)
        assert ran == ["kept"]

    def test_the_thread_may_submit_to_itself(self, thread: MLXThread) -> None:
        """Submitting does not wait, so a call may hand the thread more to do."""
        inner = thread.submit(lambda: thread.submit(lambda: "inner")).result(PATIENCE)
        assert inner.result(PATIENCE) == "inner"

    def test_the_thread_keeps_nothing_of_a_call_alive(self, thread: MLXThread) -> None:
        """Arrays must die when their user lets go, not when the next call comes."""

        class Held:
            pass

        def use(held: Held) -> Held:
            return held

        held = Held()
        reference = weakref.ref(held)
        gc.disable()
        try:
            future: Future[Held] | None = thread.submit(use, held)
            assert future is not None
            assert future.result(PATIENCE) is held
            settle(thread)
            del held, future
            assert reference() is None
        finally:
            gc.enable()

    def test_a_failed_call_leaves_no_cycle(self, thread: MLXThread) -> None:

        class Held:
            pass

        def fail(held: Held) -> None:
            raise ValueError(repr(held))

        held = Held()
        reference = weakref.ref(held)
        gc.disable()
        try:
            future: Future[None] | None = thread.submit(fail, held)
            assert future is not None
            assert isinstance(future.exception(PATIENCE), ValueError)
            settle(thread)
            del held, future
            assert reference() is None
        finally:
            gc.enable()


def settle(thread: MLXThread) -> None:
    """Wait until the thread has gone on to its worker, past every call before this one."""
    stepped = threading.Event()

    def work() -> bool:
        stepped.set()
        return False

    thread.attach(work)
    assert stepped.wait(PATIENCE)


class TestWorker:
    """The worker that runs between calls."""

    def test_it_runs_while_it_has_work_and_again_when_woken(self, thread: MLXThread) -> None:
        """True means once more; False means sleep, without polling, until `wake`."""
        runs = list[int]()
        slept, left = threading.Semaphore(0), iter([True, True, False, True, False])

        def work() -> bool:
            runs.append(threading.get_ident())
            more = next(left)
            if not more:
                slept.release()
            return more

        thread.attach(work)
        assert slept.acquire(timeout=PATIENCE)
        assert not slept.acquire(timeout=0.05)
        assert len(runs) == 3
        thread.wake()
        assert slept.acquire(timeout=PATIENCE)
        assert not slept.acquire(timeout=0.05)
        assert len(runs) == 5
        assert len(set(runs)) == 1

    def test_it_may_be_attached_before_the_start(self) -> None:
        """The order of wiring does not matter."""
        ran = threading.Event()

        def work() -> bool:
            ran.set()
            return False

        thread = MLXThread(on_exit=nothing)
        thread.attach(work)
        thread.start()
        assert ran.wait(PATIENCE)
        thread.stop(PATIENCE)

    def test_waking_without_a_worker_is_harmless(self, thread: MLXThread) -> None:
        """Nothing is attached yet while the model loads."""
        thread.wake()
        assert thread.submit(lambda: "fine").result(PATIENCE) == "fine"

    def test_no_wake_is_lost_by_a_sleeping_worker(self, thread: MLXThread) -> None:
        """Item after item, each put just when the worker goes to sleep, is found."""
        items, found = deque[int](), threading.Semaphore(0)

        def work() -> bool:
            if items:
                items.popleft()
                found.release()
            return bool(items)

        thread.attach(work)
        for item in range(3000):
            items.append(item)
            thread.wake()
            assert found.acquire(timeout=PATIENCE)

    def test_no_item_is_lost_to_many_wakers(self, thread: MLXThread) -> None:
        """Whatever the interleaving, an item put before its wake is processed."""
        wakers, each = 6, 1000
        items, seen, complete = deque[tuple[int, int]](), list[tuple[int, int]](), threading.Event()

        def work() -> bool:
            if items:
                seen.append(items.popleft())
            if len(seen) == wakers * each:
                complete.set()
            return bool(items)

        def put(waker: int) -> None:
            for number in range(each):
                items.append((waker, number))
                thread.wake()
                if number % 100 == 0:
                    thread.submit(nothing)

        thread.attach(work)
        with ThreadPoolExecutor(wakers) as pool:
            list(pool.map(put, range(wakers)))
        assert complete.wait(PATIENCE)
        assert sorted(seen) == [(w, n) for w in range(wakers) for n in range(each)]

    def test_calls_are_served_beside_a_busy_worker(self, thread: MLXThread) -> None:
        """A worker that never sleeps gives way to calls, and goes on after them."""
        steps = list[None]()

        def work() -> bool:
            steps.append(None)
            return True

        thread.attach(work)
        before = 0
        for _ in range(20):
            now = thread.submit(lambda: len(steps)).result(PATIENCE)
            assert now > before or before == 0
            before = now

    @pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3)])
    def test_a_worker_that_raises_sleeps_until_woken(
        self, thread: MLXThread, error: BaseException
    ) -> None:
        """A fault is logged, ends neither the thread nor the worker, and does not spin."""
        runs = threading.Semaphore(0)

        def work() -> bool:
            runs.release()
            raise error

        with capture_logs() as logs:
            thread.attach(work)
            assert runs.acquire(timeout=PATIENCE)
            assert not runs.acquire(timeout=0.05)
            thread.wake()
            assert runs.acquire(timeout=PATIENCE)
            assert thread.submit(lambda: "alive").result(PATIENCE) == "alive"
        assert [log["event"] for log in logs[:2]] == ["step failed"] * 2

    def test_workers_take_turns(self, thread: MLXThread) -> None:
        """A busy one keeps no other from its step, and sleepers are left alone until woken."""
        turns, slept = list[str](), threading.Semaphore(0)

        def busy() -> int:
            turns.append("busy")
            return Pace.BUSY if turns.count("busy") < 100 else Pace.IDLE

        def sleeper() -> int:
            turns.append("sleeper")
            slept.release()
            return Pace.IDLE

        thread.attach(sleeper)
        assert slept.acquire(timeout=PATIENCE)
        thread.attach(busy)
        assert slept.acquire(timeout=PATIENCE)
        while turns.count("busy") < 100:
            time.sleep(0.001)
        assert turns.count("sleeper") == 2
        thread.wake()
        assert slept.acquire(timeout=PATIENCE)

    def test_calls_in_a_row_keep_no_worker_waiting(self, thread: MLXThread) -> None:
        """After each call there is a step: who loads a model in pieces stops no stream."""
        order, over = list[str](), threading.Event()

        def work() -> int:
            order.append("step")
            return Pace.IDLE if over.is_set() else Pace.BUSY

        blocker = Blocker()
        thread.attach(work)
        thread.submit(blocker)
        blocker.wait_entered()
        calls = [thread.submit(order.append, "call") for _ in range(20)]
        blocker.let_go()
        for call in calls:
            call.result(PATIENCE)
        over.set()
        at = [place for place, what in enumerate(order) if what == "call"]
        assert all("step" in order[one:two] for one, two in itertools.pairwise(at))

    def test_a_detached_worker_runs_no_more(self, thread: MLXThread) -> None:
        """And is let go, while others go on."""
        left, other = list[None](), threading.Semaphore(0)

        def leaves() -> int:
            left.append(None)
            return Pace.BUSY

        def stays() -> int:
            other.release()
            return Pace.IDLE

        thread.attach(leaves)
        thread.attach(stays)
        thread.submit(lambda: thread.detach(leaves)).result(PATIENCE)
        steps = len(left)
        while other.acquire(blocking=False):
            pass
        thread.wake()
        assert other.acquire(timeout=PATIENCE)
        assert len(left) == steps


class TestStop:
    """The end of the thread."""

    def test_the_running_call_ends_and_the_waiting_are_cancelled(self) -> None:
        """Stopping interrupts nothing, starts nothing, and leaves no future pending."""
        thread, blocker, ran = MLXThread(on_exit=nothing), Blocker(), list[int]()
        thread.start()
        running = thread.submit(blocker)
        waiting = [thread.submit(ran.append, number) for number in range(5)]
        blocker.wait_entered()
        stopper = threading.Thread(target=thread.stop, args=(PATIENCE,))
        stopper.start()
        while not all(future.cancelled() for future in waiting):
            stopper.join(0.001)
        blocker.let_go()
        stopper.join(PATIENCE)
        assert running.result(PATIENCE) == "done"
        assert ran == []
        assert not thread._thread.is_alive()

    def test_a_busy_worker_gets_no_further_step(self) -> None:
        """The step that runs is finished; a worker with endless work does not delay the end."""
        thread, first, steps = MLXThread(on_exit=nothing), threading.Event(), list[None]()

        def work() -> bool:
            steps.append(None)
            first.set()
            return True

        thread.start()
        thread.attach(work)
        assert first.wait(PATIENCE)
        thread.stop(PATIENCE)
        count = len(steps)
        thread.wake()
        assert not thread._thread.is_alive()
        assert len(steps) == count

    def test_stopping_twice_is_stopping_once(self) -> None:
        """Also from two threads at the same time."""
        exits = list[None]()
        thread = MLXThread(on_exit=lambda: exits.append(None))
        thread.start()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(thread.stop, [PATIENCE, PATIENCE]))
        thread.stop(PATIENCE)
        assert exits == [None]

    def test_a_thread_that_never_started_can_be_stopped(self) -> None:
        """A daemon that fails before its thread runs still shuts down in order."""
        thread = MLXThread(on_exit=nothing)
        future = thread.submit(nothing)
        thread.stop(PATIENCE)
        assert future.cancelled()
        assert not thread._thread.is_alive()
        with pytest.raises(ThreadStoppedError):
            thread.submit(nothing)

    def test_nothing_is_accepted_after_the_end(self) -> None:
        """A call that would never run is refused at once; waking is harmless."""
        thread = MLXThread(on_exit=nothing)
        thread.start()
        thread.stop(PATIENCE)
        with pytest.raises(ThreadStoppedError, match="stopped"):
            thread.submit(nothing)
        with pytest.raises(ThreadStoppedError, match="stopped"):
            thread.submit(nothing).result(PATIENCE)
        thread.wake()

    def test_a_stuck_call_is_reported(self) -> None:
        """Stopping waits as long as it was told, says so, and can be tried again."""
        thread, blocker = MLXThread(on_exit=nothing), Blocker()
        thread.start()
        thread.submit(blocker)
        blocker.wait_entered()
        with pytest.raises(TimeoutError, match=r"did not stop within 0\.01 s"):
            thread.stop(0.01)
        assert thread._thread.is_alive()
        blocker.let_go()
        thread.stop(PATIENCE)
        assert not thread._thread.is_alive()

    def test_on_exit_is_the_last_call_on_the_thread(self) -> None:
        """The streams are released once, where they were made, after everything else."""
        calls = list[tuple[str, int]]()

        def note(name: str) -> None:
            calls.append((name, threading.get_ident()))

        def work() -> bool:
            note("step")
            return False

        thread = MLXThread(on_exit=lambda: note("exit"))
        thread.start()
        thread.attach(work)
        for _ in range(3):
            thread.submit(note, "call").result(PATIENCE)
        thread.stop(PATIENCE)
        names = [name for name, _ in calls]
        assert names.count("exit") == 1
        assert names[-1] == "exit"
        assert len({ident for _, ident in calls}) == 1

    def test_the_worker_is_let_go_before_on_exit(self) -> None:
        """Arrays that only the worker holds die while their streams still live."""

        class Worker:
            def step(self) -> bool:
                return False

        alive_at_exit = list[bool]()
        worker = Worker()
        reference = weakref.ref(worker)
        thread = MLXThread(on_exit=lambda: alive_at_exit.append(reference() is not None))
        thread.attach(worker.step)
        del worker
        thread.start()
        thread.submit(nothing).result(PATIENCE)
        thread.stop(PATIENCE)
        assert alive_at_exit == [False]


MLX_PROCESS = """
import sys
from umbel.models import runtime
import mlx.core as mx
from umbel.scheduler.thread import MLXThread

def compute():
    ones = mx.ones((128, 128))
    product = ones @ ones
    mx.eval(product)
    return product

for _ in range(int(sys.argv[1])):
    kept = []
    thread = MLXThread(on_exit=runtime.release_thread)
    thread.start()
    product = thread.submit(compute).result(60)
    assert thread.submit(lambda: product[0, 0].item()).result(60) == 128.0
    # Work in flight at the end, and arrays that outlive their thread.
    thread.attach(lambda: (kept.append(compute() @ product), mx.async_eval(kept[-1])) and False)
    thread.submit(lambda: None).result(60)
    thread.stop(60)
    assert not thread._thread.is_alive()
"""


def run_mlx(threads: int) -> tuple[int, str]:
    """Start and stop this many MLX threads, one after another, in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", MLX_PROCESS, str(threads)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.slow
def test_twenty_processes_with_an_mlx_thread_exit_well() -> None:
    """A process that used MLX on the thread ends with status 0, every time."""
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run_mlx, [1] * 20)) == [(0, "")] * 20


def test_one_process_may_use_twenty_mlx_threads_in_turn() -> None:
    """A stopped thread leaves nothing behind that breaks the next one."""
    assert run_mlx(20) == (0, "")
