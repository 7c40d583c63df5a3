"""An engine as the daemon assembles it, within a budget of bytes, stepped by hand.

Memory is watched from outside: by the allocator's own peak between two steps, and by a thread
that reads what is active as fast as it can.
"""

import gc
import itertools
import random
import threading
import time
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip

from umbel.cachestore.check import problems
from umbel.cachestore.checkpoints import Reason
from umbel.cachestore.ledger import Kind, Size
from umbel.daemon.config import Settings
from umbel.daemon.models.assembly import Assembly, assemble, open_folders
from umbel.daemon.models.memory_budget import MemoryBudget
from umbel.models.backends import choose
from umbel.models.backends.base import Backend
from umbel.models.kv.layout import CacheLayout
from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.params import Grammar, SamplingParams
from umbel.models.runtime import device_memory
from umbel.scheduler.lifecycle import Step
from umbel.scheduler.order import Priority
from umbel.scheduler.policy import ChunkSize
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Event, Finished, FinishReason, Request, Started, TokenEvent
from umbel.scheduler.sequence import Sequence
from umbel.scheduler.thread import Pace

from .. import zoo
from ..placement_check import problems as problems_of_state
from ..shared import labelled, measured_once

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel

GREEDY = SamplingParams(seed=0, temperature=0.0)
SEEDED = SamplingParams(seed=11, temperature=1.0, top_p=0.95)
CHUNK = 64
_PATIENCE = 60_000
"""Steps in which everything must have ended."""

_loaded: dict[tuple[str, str, Backend], "LoadedModel"] = {}


def zoo_model(
    name: str, dtype: mx.Dtype = mx.float32, device: Backend | None = None
) -> "LoadedModel":
    """Make a zoo model look like a loaded one; the same at every call.

    Args:
        name: of the architecture.
        dtype: of the weights.
        device: as which device to run it; this one, unless one is given.
    """
    device = device or choose()
    key = name, str(dtype), device
    if key not in _loaded:
        model = zoo.make(name)
        if dtype != mx.float32:
            model.set_dtype(dtype)
            mx.eval(model.parameters())
        labelled(model, name, str(dtype).removeprefix("mlx.core."))
        _loaded[key] = cast(
            "LoadedModel",
            SimpleNamespace(
                name=name,
                model=model,
                layout=CacheLayout(model),
                text=SimpleNamespace(vocab_size=zoo.VOCAB_SIZE, eos_ids=frozenset[int]()),
                fingerprint=f"{name} {dtype}",
                context_length=4096,
                weight_bytes=zoo.weight_bytes(model),
                backend=device,
            ),
        )
    return _loaded[key]


def replaced(loaded: "LoadedModel", **parts: Any) -> "LoadedModel":
    """Make another loaded model of one."""
    return cast("LoadedModel", SimpleNamespace(**(vars(loaded) | parts)))


@dataclass
class Ask:
    """A request to be sent.

    Attributes:
        tag: of its conversation; requests that share it run one after another.
        at: the step at which it comes.
        grammar: what the answer is held to.
        tenant: who sends it.
        priority: of it.
    """

    prompt: list[int]
    tokens: int
    sampling: SamplingParams = GREEDY
    boundaries: list[tuple[int, Reason]] = field(default_factory=list)
    tag: str | None = None
    at: int = 0
    deadline: float = float("inf")
    grammar: Grammar | None = None
    tenant: str = "t"
    priority: Priority = Priority.INTERACTIVE


@dataclass
class Told:
    """Everything that a client was sent."""

    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    error: Exception | None = None
    cached: int | None = None
    order: int = -1  # the number of its start among all starts


class Watch:
    """The most that was active over a base, by the allocator's peak and by a thread.

    Attributes:
        peak: by the allocator's own count.
        seen: by the thread.
        samples: how many it took.
    """

    def __init__(self, base: int) -> None:
        self.peak = self.seen = self.samples = 0
        self._base = base
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._reset = mx.reset_peak_memory

    def note(self) -> None:
        """Take in the peak since it was last reset."""
        self.peak = max(self.peak, mx.get_peak_memory() - self._base)

    def _noted_reset(self) -> None:
        self.note()
        self._reset()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.seen = max(self.seen, mx.get_active_memory() - self._base)
            self.samples += 1
            time.sleep(1e-3)  # it would take the engine's thread half its time otherwise

    @contextmanager
    def on(self) -> Iterator["Watch"]:
        """Watch until the block ends. Others may go on resetting the peak."""
        self._reset()
        vars(mx)["reset_peak_memory"] = self._noted_reset
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()
            self.note()
            vars(mx)["reset_peak_memory"] = self._reset


_SETTINGS: dict[str, Any] = {
    "prefill_chunk": CHUNK,
    "max_stall_ms": 1e9,
    "checkpoint_interval": 128,
    "warmup": "none",
}


class ServerFixture:
    """One assembled engine. Without other settings it does not warm up.

    What its model was measured to take may be known; see `shared.measured_once`.

    Attributes:
        told: what clients have heard, by request.
        live: the sequences, by request.
    """

    def __init__(
        self,
        loaded: "LoadedModel",
        budget: int | str | None,
        *,
        disk: Path | None = None,
        measured: Path | None = None,
        memory: MemoryBudget | None = None,
        called: Container[str] = (),
        **more: Any,
    ) -> None:
        gc.collect()  # what is freed later would be taken for this server's
        settings = Settings(
            cache_bytes=budget,
            no_disk=disk is None,
            disk_dir=None if disk is None else str(disk),
            **_SETTINGS | more,
        )
        self.queue = ConversationQueue(4096)
        self.events: list[tuple[Sequence, Event]] = []
        self.woken = threading.Event()
        self.memory = memory or MemoryBudget(settings, device_memory())
        with measured_once(loaded.model, called=called), ExitStack() as undo:
            folders = open_folders(settings, [loaded.name])
            if folders is not None:
                undo.callback(folders.close)
            self.assembly: Assembly = assemble(
                loaded,
                settings,
                self.memory,
                self.queue,
                self.events.extend,
                self.woken.set,
                measured,
                folders=folders,
            )
            self._undo = undo.pop_all()
        self.name = loaded.name
        self.engine = self.assembly.engine
        self.budget = self.assembly.cache.pool.budget.nbytes
        self.told: dict[str, Told] = {}
        self.live: dict[str, Sequence] = {}
        self.paces: list[Pace] = []
        self._numbers = itertools.count()
        self._starts = itertools.count()

    def save(self) -> None:
        """Write what is to be written."""
        if self.assembly.disk is not None and self.assembly.pager is not None:
            while self.assembly.pager.write_all():
                self.assembly.disk.flush(10)

    def close(self) -> None:
        """Write what is to be written, and give the folder up."""
        self.save()
        if self.assembly.disk is not None:
            self.assembly.disk.close(10)
        self._undo.close()

    @property
    def preemptions(self) -> int:
        """How often a sequence was preempted."""
        return self.engine.statistics().preemptions

    @property
    def limit(self) -> int:
        """Tokens of prompt and answer together."""
        return self.assembly.context_length

    def send(self, ask: Ask) -> str:
        """Queue a request; returns its id."""
        name = f"r{next(self._numbers)}"
        request = Request(
            id=name,
            tenant=ask.tenant,
            conversation=ask.tag or name,
            prompt=ask.prompt,
            max_tokens=ask.tokens,
            sampling=ask.sampling,
            deadline=ask.deadline,
            boundaries=ask.boundaries,
            grammar=ask.grammar,
            priority=ask.priority,
        )
        self.live[name] = Sequence(request)
        self.told[name] = Told()
        self.queue.put(self.live[name])
        return name

    def step(self) -> Pace:
        """Do a step, and take in what it said. The cache is sound afterwards."""
        pace = self.engine.step()
        self.paces.append(pace)
        placement, caches = self.assembly.runner.placement, self.engine._kv_cache.caches
        assert problems_of_state(placement, caches.values()) == []
        for sequence, event in self.events:
            told = self.told[sequence.request.id]
            assert told.reason is None, "an event after the last one"
            if isinstance(event, TokenEvent):
                told.tokens.append(event.token)
            elif isinstance(event, Started):
                assert told.cached is None, "it started twice"
                told.cached, told.order = event.cached, next(self._starts)
            elif isinstance(event, Finished):
                told.reason, told.error = event.reason, event.error
        self.events.clear()
        return pace

    def until(self, condition: Callable[[], bool], steps: int = _PATIENCE) -> None:
        """Step until something is so."""
        for _ in range(steps):
            if condition():
                return
            if self.step() is Pace.WAITING:
                self.woken.wait(0.5)
                self.woken.clear()
        raise AssertionError("it never came about")

    @property
    def idle(self) -> bool:
        """Return True if no sequence waits, runs or is preempted."""
        return self.engine._scheduler.idle

    def serve(self, asks: Items[Ask], after: Callable[[], None] = lambda: None) -> list[Told]:
        """Serve requests that come at the steps they say, to their ends."""
        names: dict[int, str] = {}
        for step in range(_PATIENCE):
            for number, ask in enumerate(asks):
                if ask.at <= step and number not in names:
                    names[number] = self.send(ask)
            if len(names) == len(asks) and self.idle:
                break
            if self.step() is Pace.WAITING:
                self.woken.wait(0.5)
                self.woken.clear()
            after()
        assert self.idle, "it never ended"
        return [self.told[names[number]] for number in range(len(asks))]

    def allow(self, nbytes: int) -> None:
        """Set another budget from now on."""
        self.assembly.cache.pool.resize(Size(nbytes, self.assembly.cache.pool.budget.buffers))

    def cache_of(self, name: str) -> SequenceCache:
        """The state of a sequence that runs."""
        cache: SequenceCache = self.engine._kv_cache.caches[self.live[name]]
        return cache

    def squeeze(self) -> None:
        """Take memory away, little by little, until one runs alone.

        A preempted sequence gives all of it back for that step: to leave a batch takes more than
        the batch did, and a single one is not to start again.
        """
        before, nbytes, preempt = self.preemptions, 2 * self.budget, self.engine._preempt

        def preempted(sequence: Sequence, step: Step) -> None:
            preempt(sequence, step)
            self.allow(self.budget)

        vars(self.engine)["_preempt"] = preempted
        while len(self.engine._scheduler.running) > 1:
            nbytes = nbytes * 39 // 40
            self.allow(nbytes)
            running, caches = self.engine._scheduler.running, self.engine._kv_cache.caches
            if self.engine._memory.afford(running, ChunkSize(CHUNK), caches) is None:
                self.step()
        del vars(self.engine)["_preempt"]
        assert self.preemptions > before

    # -- what must be true -------------------------------------------------------------

    @property
    def active(self) -> int:
        """Return the active bytes beyond the weights."""
        return mx.get_active_memory() - self.assembly.runner.resident

    @property
    def booked(self) -> int:
        """Return the ledger's bytes without transients."""
        ledger = self.assembly.cache.ledger
        return ledger.total.nbytes - ledger.held(Kind.TRANSIENT).nbytes

    def check_rest(self) -> None:
        """No request is left: no leases, no slots, and the ledger has stored state only."""
        cache, ledger = self.assembly.cache, self.assembly.cache.ledger
        assert problems(cache) == []
        assert cache.leases == set()
        assert self.engine._scheduler.running == []
        assert len(self.queue._claimed) == 0
        assert self.assembly.runner.placement.sequences == {}
        assert ledger.held(Kind.TAIL).nbytes == 0
        assert ledger.held(Kind.TRANSIENT).nbytes == 0
        assert (
            ledger.held(Kind.KV).nbytes + ledger.held(Kind.CHECKPOINT).nbytes
            == cache.tries.size.nbytes
        )


def words(count: int, seed: Any, vocabulary: int = zoo.VOCAB_SIZE) -> list[int]:
    """Make up a piece of prompt."""
    rng = random.Random(str(seed))  # noqa: S311  (not a secret)
    return [rng.randrange(vocabulary) for _ in range(count)]


def agents(
    count: int,
    *,
    system: int = 130,
    user: Items[int] = (40,),
    answer: Items[int] = (60,),
    sampling: Items[SamplingParams] = (GREEDY,),
    every: int = 0,
    seed: Any = "",
) -> list[Ask]:
    """Agents of one system prompt; lengths are taken in turn."""
    shared = words(system, f"system {seed}")
    return [
        Ask(
            [*shared, *words(user[i % len(user)], f"user {seed} {i}")],
            answer[i % len(answer)],
            sampling[i % len(sampling)],
            [(system, Reason.SYSTEM)] if system else [],
            at=i * every,
        )
        for i in range(count)
    ]


def loners(count: int, prompt: Items[int], answer: Items[int], **more: Any) -> list[Ask]:
    """Requests that have nothing in common."""
    return agents(count, system=0, user=prompt, answer=answer, **more)
