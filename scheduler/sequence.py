"""A request while the engine works on it."""

import enum
from typing import TYPE_CHECKING

import numpy as np

from ..cachestore.node import Tokens, as_tokens
from ..models.params import Row
from .request import Request
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


class Sequence:
    """A request's state on its way through the engine. Owned by the MLX thread.

    `cancelled` is the one attribute that another thread sets; the engine reads it at its
    next step.

    Attributes:
        tokens: what is prefilled, as the cache wants it: the prompt, and what was answered
            before a preemption.
        matched: prompt tokens that the trie recognised when it first started.
        cached: prompt tokens whose state was restored then.
        output: token ids of the answer so far.
        pending: the place of the token after these among those that were sampled last, while it
            is not read yet.
        number: of its first start, among all.
        times: what it does and waits for; None before it is queued.
        needs: bytes that it lacked when memory was short for it, and those that may be used.
        num_restored_bytes: bytes that were read from disk or copied for it and not charged yet.
        num_charged: tokens of the answer that its tenant was charged for.
        num_charged_of_prompt: tokens of the prompt, when it last left the queue.
        end_token: the token that ended the answer; it is no part of it.
        num_computed_tokens: tokens, from the first, whose state the model holds.
        num_passed_over: prompt tokens computed for later ones of its tenant while its own waited.
        is_due: it starts, or started, as its tenant's oldest that others have passed over for long.
        precedence: of its tenant's prompts among other tenants', the lower the earlier, while it is
            prefilled; see `precedence.py`.
        num_retries: times that it started again since a call with others failed.
        num_awaited: tokens of its prompt, from the first, that another request waits for.
        lease: its hold on the cache; None before it starts.
        chunk_boundaries: offsets at which its prefill stops for a checkpoint, and why, ascending.
        frontier: offset of the last prompt checkpoint, from which decode ones are counted.
        constraint: where its answer stands in its grammar, from its first start on, if it has one.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: Tokens = as_tokens(request.prompt)
        self.status = SequenceStatus.WAITING
        self.cancelled = False
        self.output: list[int] = []
        self.pending: int | None = None
        self.number = 0
        self.times: Times | None = None
        self.needs: tuple[int, int] | None = None
        self.num_restored_bytes = 0
        self.num_charged = self.num_charged_of_prompt = 0
        self.end_token: int | None = None
        self.matched = self.cached = 0
        self.num_computed_tokens = 0
        self.num_passed_over = 0
        self.is_due = False
        self.precedence = 0.0
        self.num_retries = self.num_awaited = 0
        self.lease: Lease | None = None
        self.chunk_boundaries: dict[int, Reason] = {}
        self.frontier = 0
        self._furthest = 0
        self.constraint: Constraint | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    @property
    def computed(self) -> Tokens:
        """The tokens whose state the model holds, as the cache wants them."""
        end = [] if self.end_token is None else [self.end_token]
        prompt = self.tokens[: self.num_prompt_tokens]
        whole = np.concatenate([prompt, as_tokens([*self.output, *end])])
        return whole[: self.num_computed_tokens]

    @property
    def num_known_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return self.num_prompt_tokens + len(self.output)

    @property
    def has_advanced(self) -> bool:
        """Whether it holds the state of more tokens than when it was last preempted."""
        return self.num_computed_tokens > self._furthest

    @property
    def num_left_to_prefill(self) -> int:
        """Tokens to prefill. The call that computes the last one gives the next token's logits."""
        return max(0, len(self.tokens) - self.num_computed_tokens)

    @property
    def is_awaited(self) -> bool:
        """Whether another request waits for tokens of it that are not in the cache yet."""
        return self.lease is not None and self.lease.held < self.num_awaited

    @property
    def num_left_to_share(self) -> int:
        """Tokens to prefill until somebody can use them: another that waits, or else itself."""
        if self.is_awaited:
            return max(0, self.num_awaited - self.num_computed_tokens)
        return self.num_left_to_prefill

    @property
    def replays(self) -> bool:
        """Whether the token after those that are computed is known, from before a preemption."""
        return self.num_computed_tokens < self.num_known_tokens

    def note(self, activity: Activity, now: float) -> None:
        """Say what it does or waits for from now on."""
        if self.times is not None:
            self.times.note(activity, now)

    def preempt(self, *, replay: bool) -> None:
        """Be ready to start again, without any state.

        Args:
            replay: what was answered is decoded again, not prefilled, so that each token is
                computed as it was the first time.
        """
        self.status = SequenceStatus.PREEMPTED
        self._furthest = max(self._furthest, self.num_computed_tokens)
        answered = [] if replay else self.output
        self.tokens = as_tokens([*self.request.prompt, *answered])
        self.num_computed_tokens = 0
        self.pending = self.lease = None
        self.chunk_boundaries = {}

    @property
    def last_known_token(self) -> int:
        """The token that the next decode step takes, where none is pending."""
        return self.output[self.num_computed_tokens - self.num_prompt_tokens]

    @property
    def wants_more(self) -> bool:
        """Whether its answer is not complete with the token that is pending."""
        return len(self.output) + (self.pending is not None) < self.request.max_tokens

    @property
    def row(self) -> Row:
        """What sampling must know of this sequence."""
        mask = None if self.constraint is None else self.constraint.mask
        return Row(self.request.sampling, self.request.prompt, self.output, mask)
