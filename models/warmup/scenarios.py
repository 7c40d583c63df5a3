"""What a warm-up runs: every kind of step that serving meets, as plain data.

Kernels differ by what is computed, in which type and over which kind of layout, and less by how
much of it. So a kind of step is met with few tokens and rows where that can be: a row that is full
after `_FEW` tokens is packed in the fifth step, not in the thousandth.

Each scenario is there for what no other one meets: tests/scenario/test_warmup_kinds.py holds them
to that.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from ..batch_planner import SHARED
from ..kv.alignment import FEW
from ..kv.buckets import bucket, positions_for, prompt_tokens
from ..kv.stacking import LOOSE
from ..params import SamplingParams
from ..planned_for import Rules

COMMON = max(SHARED, FEW) + 11
"""Tokens of a beginning that sequences read together: enough for a product, and as most are, no
multiple of eight."""

_TURN = 70
"""Tokens that a turn adds to a conversation."""
_JOINT = 1024
"""Tokens of prompts that are computed in one call, at most: as in `scheduler/policy.py`."""
_BESIDE = 8
"""Prompts of one call, at most, whose every length is met; of more a turn's is, in `_together`."""
_LONG = 4096 + 11
"""Tokens of a long beginning, for which products have other kernels than for `COMMON`. It has half
of the context at most."""
_BEFORE = 9
"""Tokens that each prompt of such a call has of its own before it, as those of a next turn have."""
_LONE = 256
"""Tokens from which on MLX has cuDNN decode one sequence whose keys lie in one piece. Its first
kernel takes most of a second."""

_FEW = 4
"""Tokens of its own after which a row is packed, where that shall be soon."""
_APART = 48
"""Tokens that such a row does not copy."""
_MANY = 256
"""Tokens of its own after which a row is packed, where that shall not be soon."""

GREEDY = SamplingParams(seed=0, temperature=0.0)
DRAWN = SamplingParams(seed=0)
EVERYTHING = SamplingParams(
    seed=0,
    top_p=0.9,
    top_k=20,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    top_logprobs=5,
)


class Start(NamedTuple):
    """Sequences start.

    Attributes:
        sequences: how many.
        shared: how many beginnings they read together, each after the one before.
        spans: tokens of each span that every one of them reads alone after these.
        prompt: tokens that each computes then.
        beginning: tokens of each of `shared`.
    """

    sequences: int
    shared: int = 0
    spans: tuple[int, ...] = ()
    prompt: int = 0
    beginning: int = COMMON


class Decode(NamedTuple):
    """All get a token in each of some steps.

    Attributes:
        steps: how many.
        end: how many sequences end with the last of them, those who started first.
        sampling: of the rows, in turn.
        masked: a grammar says which tokens may be chosen.
    """

    steps: int
    end: int = 0
    sampling: tuple[SamplingParams, ...] = (GREEDY, DRAWN)
    masked: bool = False


class NextTurn(NamedTuple):
    """Sequences end, and their state is stored; then they go on with a longer prompt.

    Attributes:
        sequences: how many, those who started first.
        prompt: tokens that each computes after what was stored.
    """

    sequences: int
    prompt: int


class Prompts(NamedTuple):
    """The prompts of all advance, in one call where the model allows that.

    Attributes:
        tokens: of the first one's.
        more: that each has over the one before.
    """

    tokens: int
    more: int = 1


Event = Start | Decode | NextTurn | Prompts


@dataclass(frozen=True)
class Scenario:
    """Sequences that run together. In the end all end.

    Where fewer may run at once than start, it is run with fewer.

    Attributes:
        name: for the log.
        events: what happens, in order.
        limit: tokens of its own after which a row is packed; 0 for as many as when serving.
        spare_steps: for which the batch may have more rows than it needs; None as when serving.
    """

    name: str
    events: tuple[Event, ...]
    limit: int = 0
    spare_steps: int | None = None

    def rules(self, served: Rules) -> Rules:
        """The rules by which its steps are planned.

        Args:
            served: those of serving.
        """
        spare = served.spare_steps if self.spare_steps is None else self.spare_steps
        # The second step of each form is compiled: nobody waits for what that takes but once.
        rules = replace(served, spare_steps=spare, compile_after=min(1, served.compile_after))
        if not self.limit:
            return rules
        return replace(rules, row_limit=self.limit, own=self.limit // 2)


def quick(rows: int, served: Rules, chunk: int) -> list[Scenario]:
    """Every kind of step once, those that are met first before the others.

    Args:
        rows: the most that run at once.
        served: the rules of serving.
        chunk: the most tokens of a prompt that are computed at once.
    """
    counts = sorted({min(bucket(count), rows) for count in range(2, rows + 1)})
    return [
        _prompts(chunk),
        _together(rows, chunk),
        _ALONE,
        _SAMPLING,
        *[Scenario(f"{count} rows", (Start(count, 1), Decode(3))) for count in counts],
        _side_by_side(served.own + 8),
        _MORE_ROWS,
        _FEWER_ROWS,
        _FULL_ROWS,
        _TURNS,
    ]


def full(rows: int, served: Rules, chunk: int, window: int) -> list[Scenario]:
    """Every kind of step, and every shape that a batch may have.

    Args:
        rows: the most that run at once.
        served: the rules of serving.
        chunk: the most tokens of a prompt that are computed at once.
        window: tokens of the longest window.
    """
    counts = sorted({min(bucket(count), rows) for count in range(2, rows + 1)})
    longest, sizes = max(served.row_limit, window), served.position_sizes
    lengths = sorted(
        {min(positions_for(tokens, sizes), longest) for tokens in range(1, longest + 1)}
    )
    chunks = [min(1 << octave, chunk) for octave in range(1, chunk.bit_length() + 1)]
    return [
        *quick(rows, served, chunk),
        *[_positions(length, counts, served.row_limit) for length in lengths if counts],
        *[_chunk(tokens) for tokens in sorted(set(chunks))],
    ]


def padded_prompts(rows: int, chunk: int, multiple: int, context: int) -> Scenario:
    """Prompts of several in one call, in all lengths that such a call is padded to.

    Each number of tokens may have kernels of its own for the model's products.

    Args:
        rows: the most that run at once.
        chunk: the most tokens of a prompt that are computed at once.
        multiple: of tokens, to which rows of several prompts are padded.
        context: tokens of the longest prompt.
    """
    beginning, most = min(_LONG, context // 2), min(chunk, _JOINT)

    def chunks(count: int) -> list[int]:
        longest = min(most // count, context - beginning - _BEFORE - multiple)
        widths = range(multiple, prompt_tokens(longest, count, multiple) + 1, multiple)
        return [*widths[:1], *[width - 1 for width in widths]]  # the first without padding, too

    return Scenario(
        "padded prompts",
        tuple(
            event
            for count in range(2, min(rows, _BESIDE) + 1)
            for tokens in chunks(count)
            for event in (
                Start(count, 1, (_BEFORE,), beginning=beginning),
                Prompts(tokens, more=0),
                Decode(0, end=count),
            )
        ),
    )


def _prompts(chunk: int) -> Scenario:
    """Chunks of prompts: the first and others, from nothing and over one and two spans."""
    return Scenario(
        "prompts",
        tuple(
            event
            for shared in range(3)
            for tokens in (1, chunk + 1, chunk + 7)
            for event in (Start(1, shared, (), tokens), Decode(0, end=1))
        ),
    )


def _together(rows: int, chunk: int) -> Scenario:
    """Prompts of several in one call; each number of rows makes other graphs of kernels, once."""
    tokens = min(_TURN, chunk)
    most = min(rows, min(chunk, _JOINT) // tokens)
    return Scenario(
        "prompts together",
        (
            *(Start(2, 1), Prompts(3, more=0), Decode(0, end=2)),  # they share all that they have
            *(Start(2, 1), Start(1, 1, (9,)), Start(1), Prompts(3), Prompts(1), Decode(0, end=4)),
            *(
                event
                for count in range(2, most + 1)
                for event in (Start(count, 1), Prompts(tokens, more=0), Decode(0, end=count))
            ),
        ),
    )


_ALONE = Scenario(
    "alone",
    (
        *(Start(1), Decode(1, end=1), Start(1, 1), Decode(1, end=1)),
        *(Start(2, 1), Decode(1, end=1), Decode(9, end=1)),  # in the end in one piece
        *(Start(1, 1, (_LONE,)), Decode(9)),
    ),
)

_SAMPLING = Scenario(
    "sampling",
    (
        *(Start(1, 1), Decode(1, 0, (GREEDY,)), Decode(1, 0, (DRAWN,))),
        Decode(2, 0, (EVERYTHING,), masked=True),
    ),
)


def _side_by_side(apart: int) -> Scenario:
    """Rows that read something together, or much that nobody else does.

    Up to `LOOSE` of the latter read it span by span, one more side by side, and who comes then
    reads a span beside that.
    """
    others = [event for _ in range(LOOSE + 2) for event in (Start(1, 0, (apart,)), Decode(2))]
    return Scenario("side by side", (Start(2, 2), Start(1, 1), *others))


_MORE_ROWS = Scenario(
    "more rows",
    (
        *(Start(1, 0, (), 57), Start(1, 0, (9, 9)), Decode(2)),
        *(Start(2), Decode(8)),  # until one needs more positions
    ),
    limit=_MANY,
)

_FEWER_ROWS = Scenario(
    "fewer rows",
    (
        *(Start(4, 0, (9,)), Decode(2, end=1), Decode(2, end=1)),
        *(Start(1, 0, (9,)), Decode(2)),  # in a slot that somebody else had
    ),
    limit=_MANY,
    spare_steps=0,
)

_FULL_ROWS = Scenario(
    "rows are full",
    (Start(2, 0, (_APART, _APART), 3), Decode(6), Decode(2, end=1), Decode(2)),
    limit=_FEW,
)

_TURNS = Scenario(
    "turns",
    (
        *(Start(1, 1, (4 * _APART,)), Start(1, 1, (_APART, _APART)), Start(3, 1, (_APART,))),
        *(Decode(2), NextTurn(1, 5), Decode(2, end=3), Decode(2)),
        *(Start(1, 1, (_APART,)), Decode(2), NextTurn(3, 5), Decode(2)),
    ),
    limit=_FEW,
)


def _positions(length: int, counts: list[int], limit: int) -> Scenario:
    """Batches whose longest row needs so many positions."""
    events = [
        event
        for count in counts
        for event in (Start(1, 0, (length - 8,)), Start(count - 1, 1), Decode(2, end=count))
    ]
    return Scenario(f"{length} positions", tuple(events), limit=2 * min(length, limit))


def _chunk(tokens: int) -> Scenario:
    """Chunks of so many tokens."""
    events = [
        event for shared in range(3) for event in (Start(1, shared, (), tokens), Decode(0, end=1))
    ]
    return Scenario(f"prompts of {tokens}", tuple(events))
