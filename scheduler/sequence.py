"""A request while the engine works on it."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..cachestore.node import Tokens, as_tokens
from ..models.params import Row
from .request import Request, Started
from .times import Activity, Times

if TYPE_CHECKING:
    from ..cachestore.checkpoints import Reason
    from ..cachestore.prefix_cache import Lease
    from .masks import Constraint


class SequenceStatus(enum.StrEnum):
    """Where a sequence stands. It moves down this list; a preempted one starts again."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass
class Prefill:
    """How a sequence's prompt is computed."""

    # offsets at which a chunk ends for a checkpoint, and why, ascending
    boundaries: "dict[int, Reason]" = field(default_factory=dict)
    frontier: int = 0  # offset of the last prompt checkpoint, from which decode ones are counted
    awaited: int = 0  # tokens, from the first, that another request waits for
    passed_over: int = 0  # tokens computed for later prompts of its tenant meanwhile
    furthest: int = 0  # the most tokens whose state it held before it was preempted


@dataclass
class Bill:
    """Charges to a sequence's tenant."""

    prompt: int = 0  # tokens of the prompt that were charged when it last left the queue
    answer: int = 0  # tokens of the answer that were charged
    restored_bytes: int = 0  # bytes read from disk or copied for it, and not charged yet


class Sequence:
    """A request's state on its way through the engine. Owned by the MLX thread."""

    def __init__(self, request: Request) -> None:
        self.request = request
        # the tokens to prefill, as the cache wants them: the prompt, the answer before a
        # preemption, and at the end a token that ended it
        self.tokens: Tokens = as_tokens(request.prompt)
        self.status = SequenceStatus.WAITING
        self.cancelled = False  # set by other threads; read at the next step
        self.output: list[int] = []  # token ids of the answer so far
        self.pending: int | None = None  # place of the unread token among those sampled last
        self.num_computed_tokens = 0  # tokens, from the first, whose state the model holds
        self.num_retries = 0  # restarts after a call that failed for several sequences
        self.started: Started | None = None  # the event of its first start; None before
        self.times: Times | None = None  # its activities; None before it is queued
        self.lease: Lease | None = None  # its hold on the cache; None unless it runs
        # the answer's place in its grammar, from the first start on, if it has one
        self.constraint: Constraint | None = None
        self.prefill = Prefill()
        self.bill = Bill()

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def num_known_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return self.num_prompt_tokens + len(self.output)

    @property
    def computed(self) -> Tokens:
        """The tokens whose state the model holds, as the cache wants them."""
        tokens = self.tokens
        if self.num_computed_tokens > len(tokens):
            tokens = np.concatenate([as_tokens(self.request.prompt), as_tokens(self.output)])
        return tokens[: self.num_computed_tokens]

    @property
    def num_left_to_prefill(self) -> int:
        """Tokens to prefill. The call that computes the last one gives the next token's logits."""
        return max(0, len(self.tokens) - self.num_computed_tokens)

    @property
    def is_awaited(self) -> bool:
        """True if another request waits for tokens of it that are not in the cache yet."""
        return self.lease is not None and self.lease.reached < self.prefill.awaited

    @property
    def num_left_to_share(self) -> int:
        """Tokens to prefill until a request that waits for them can start, or its own answer."""
        if self.is_awaited:
            return max(0, self.prefill.awaited - self.num_computed_tokens)
        return self.num_left_to_prefill

    @property
    def wants_more(self) -> bool:
        """True if its answer is not complete with the pending token."""
        return len(self.output) + (self.pending is not None) < self.request.max_tokens

    @property
    def row(self) -> Row:
        """The arguments of sampling."""
        mask = None if self.constraint is None else self.constraint.mask
        return Row(self.request.sampling, self.request.prompt, self.output, mask)

    def note(self, activity: Activity, now: float) -> None:
        """Change its activity, if it was queued."""
        if self.times is not None:
            self.times.note(activity, now)

    def preempt(self, *, replay: bool) -> None:
        """Be ready to start again, without any state.

        With `replay` the answer so far is decoded again, not prefilled, so that each token is
        computed as it was the first time.
        """
        self.status = SequenceStatus.PREEMPTED
        self.prefill.furthest = max(self.prefill.furthest, self.num_computed_tokens)
        self.prefill.boundaries = {}
        self.tokens = as_tokens([*self.request.prompt, *([] if replay else self.output)])
        self.num_computed_tokens = 0
        self.pending = self.lease = None

    def end_with(self, token: int) -> None:
        """Note a token that ended the answer and is no part of it; its state may be computed."""
        self.tokens = as_tokens([*self.request.prompt, *self.output, token])
