"""Logits to tokens: the results of a step, and the choice of one token a row.

Parameters are arrays, one row a request. mlx-lm's samplers compile theirs as constants, so that
every new temperature costs a compilation (about 0.5 s on the CPU), and draw from the thread's
global random state, so that neighbours change each other's answers.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Self, cast

import mlx.core as mx
import numpy as np

from .params import LogProbs, Row, SamplingParams, Token
from .runtime import launch

# Below this a draw is greedy except for ties, and dividing by much less overflows to NaN.
_LEAST_TEMPERATURE = 1e-6
_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads consecutive positions over keys


class ForwardOutput:
    """Logits after one token of each of some sequences.

    Attributes:
        logits: `[sequences, V]`, not yet evaluated; None where all failed.
        errors: of failed calls, by the place of each of their sequences. Their rows of `logits`
            mean nothing.
    """

    def __init__(self, logits: mx.array | None, errors: dict[int, BaseException]) -> None:
        self.logits = logits
        self.errors = errors


class SamplerOutput:
    """Chosen tokens, which may still be computed.

    Attributes:
        tokens: `[rows]` ids.
        errors: of failed rows, by their number; their tokens mean nothing.
    """

    def __init__(
        self,
        tokens: mx.array,
        errors: dict[int, BaseException],
        logprobs: dict[int, tuple[mx.array, mx.array, mx.array]],
    ) -> None:
        self.tokens = tokens
        self.errors = errors
        self._logprobs = logprobs
        launch(tokens, list(logprobs.values()))

    @classmethod
    def empty(cls) -> Self:
        """The output for no rows."""
        return cls(mx.zeros(0, mx.uint32), {}, {})

    def read(self) -> list[Token]:
        """Wait for the tokens."""
        ids = cast("list[int]", self.tokens.tolist())
        return [Token(token, self._logprobs_of(row)) for row, token in enumerate(ids)]

    def pending(self, place: int) -> "PendingToken":
        """Name a token, which may still be computed."""
        return PendingToken(self, place)

    def _logprobs_of(self, row: int) -> LogProbs | None:
        if row not in self._logprobs:
            return None
        chosen, tokens, values = (array.tolist() for array in self._logprobs[row])
        return LogProbs(cast("float", chosen), list(zip(tokens, values, strict=True)))  # type: ignore[arg-type]


class PendingToken(NamedTuple):
    """A sampled token, which may still be computed.

    Attributes:
        output: with the token.
        place: its number there.
    """

    output: SamplerOutput
    place: int


NextToken = int | PendingToken


def stacked(parts: Sequence[mx.array | None], rows: Sequence[int]) -> mx.array | None:
    """Join the logits of calls. A call that failed gets other rows, as many as it has."""
    done = next((part for part in parts if part is not None), None)
    if done is None or len(parts) == 1:
        return done
    return mx.concatenate(
        [
            mx.broadcast_to(done[:1], (count, *done.shape[1:])) if part is None else part
            for part, count in zip(parts, rows, strict=True)
        ]
    )


def gather(tokens: Sequence[NextToken]) -> mx.array:
    """Put tokens in one array, `[B]`, without waiting for pending ones.

    Raises:
        ValueError: pending tokens come from several outputs.
    """
    pending = [token for token in tokens if isinstance(token, PendingToken)]
    if not pending:
        return mx.array(list(tokens), mx.uint32)  # as outputs are
    output = pending[0].output
    if any(token.output is not output for token in pending):
        raise ValueError("a step's tokens come from one output")
    known = [token for token in tokens if not isinstance(token, PendingToken)]
    size, found = len(output.tokens), 0
    source = []
    for token in tokens:
        if isinstance(token, PendingToken):
            source.append(token.place)
        else:
            source.append(size + found)
            found += 1
    joined = output.tokens
    if known:
        joined = mx.concatenate([joined, mx.array(known, joined.dtype)])
    return joined if source == list(range(len(joined))) else joined[mx.array(source)]


# -- the choice of tokens ----------------------------------------------------------------


def sample(
    logits: mx.array, rows: Sequence[Row], vocab_size: int, *, each: bool = False
) -> SamplerOutput:
    """Launch the choice of one token for each row; a row's error is in the output.

    Args:
        logits: see `sample_tokens`, as for those that follow.
        rows: see above.
        vocab_size: see above.
        each: compute row by row, so that nothing depends on how many there are.
    """
    errors: dict[int, BaseException] = {}
    tokens = None
    if not each:
        # Sampling row by row finds the one that failed.
        with suppress(BaseException):
            tokens = sample_tokens(logits, rows, vocab_size)
    if tokens is None:
        tokens, errors = _sample_each(logits, rows, vocab_size)
    logprobs: dict[int, tuple[mx.array, mx.array, mx.array]] = {}
    for i, row in enumerate(rows):
        if row.params.top_logprobs is None or i in errors:
            continue
        try:
            logprobs[i] = _logprobs(logits[i, :vocab_size], tokens[i], row.params.top_logprobs)
        except BaseException as error:  # noqa: BLE001  (this row's own)
            errors[i] = error
    return SamplerOutput(tokens, errors, logprobs)


def _sample_each(
    logits: mx.array, rows: Sequence[Row], vocab_size: int
) -> tuple[mx.array, dict[int, BaseException]]:
    errors: dict[int, BaseException] = {}
    tokens = []
    for i, row in enumerate(rows):
        try:
            tokens.append(sample_tokens(logits[i : i + 1], [row], vocab_size))
        except BaseException as error:  # noqa: BLE001  (this row's own)
            errors[i] = error
            tokens.append(mx.zeros(1, mx.uint32))
    return mx.concatenate(tokens), errors


def _logprobs(logits: mx.array, token: mx.array, count: int) -> tuple[mx.array, mx.array, mx.array]:
    """The token's log-probability, and the `count` likeliest tokens with theirs."""
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits)
    likeliest = mx.argsort(-logprobs)[:count]
    return logprobs[token], likeliest, logprobs[likeliest]


def sample_tokens(logits: mx.array, rows: Sequence[Row], vocab_size: int) -> mx.array:
    """Choose one token for each row.

    Args:
        logits: `[B, V]`, any float type.
        rows: B rows.
        vocab_size: of the tokenizer; a model's output layer may be padded beyond it.

    Returns:
        `[B]` token ids, not yet evaluated. A row's token depends on its own logits,
        parameters, seed and position only.
    """
    logits = _masked(_penalised(logits[:, :vocab_size].astype(mx.float32), rows), rows)
    greedy = mx.argmax(logits, axis=-1)
    if all(row.params.greedy for row in rows):
        return greedy
    temperature = _column([_temperature(row.params) for row in rows])
    scores = _filtered(logits / temperature, rows)
    noise = mx.stack([_gumbel(row, logits.shape[-1]) for row in rows])
    drawn = mx.argmax(scores + noise, axis=-1)
    return mx.where(mx.array([row.params.greedy for row in rows]), greedy, drawn)


def _temperature(params: SamplingParams) -> float:
    return 1.0 if params.greedy else max(params.temperature, _LEAST_TEMPERATURE)


def _gumbel(row: Row, size: int) -> mx.array:
    """Noise that makes argmax a draw (Gumbel-max), keyed by seed and position alone."""
    key = (row.params.seed + len(row.output) * _MIX) % 2**64
    return mx.random.gumbel((size,), key=mx.random.key(key))


def _penalised(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    if not any(_has_penalty(row.params) for row in rows):
        return logits
    # A tokenizer may know more tokens than the output layer: those have no logit.
    shape = (len(rows), logits.shape[-1])
    counts, seen, bias = (np.zeros(shape, np.float32) for _ in range(3))
    for i, row in enumerate(rows):
        if row.output:
            np.add.at(counts[i], np.asarray(row.output), 1)
        if row.params.repetition_penalty != 1.0:
            tokens = np.asarray([*row.prompt, *row.output], np.int64)
            seen[i, tokens[tokens < shape[1]]] = 1
        for token, value in row.params.logit_bias.items():
            if token < shape[1]:
                bias[i, token] = value
    repetition = _column([row.params.repetition_penalty for row in rows])
    scaled = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(mx.array(seen) > 0, scaled, logits)
    times = mx.array(counts)
    presence = _column([row.params.presence_penalty for row in rows])
    frequency = _column([row.params.frequency_penalty for row in rows])
    return logits - presence * (times > 0) - frequency * times + mx.array(bias)


def _has_penalty(params: SamplingParams) -> bool:
    return bool(
        params.logit_bias
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
    )


def _masked(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Keep the tokens that rows' masks allow. It comes after biases, which allow no others."""
    if all(row.mask is None for row in rows):
        return logits
    words = -(-logits.shape[-1] // 32)
    everything = np.full(words, 2**32 - 1, np.uint32)
    masks = [everything if row.mask is None else row.mask[:words] for row in rows]
    bits = mx.array(np.stack(masks))[:, :, None] >> mx.arange(32, dtype=mx.uint32)
    allowed = (bits & 1).astype(mx.bool_).reshape(len(rows), -1)[:, : logits.shape[-1]]
    return mx.where(allowed, logits, -mx.inf)


def _filtered(scores: mx.array, rows: Sequence[Row]) -> mx.array:
    """Apply top-k, then top-p, then min-p, each on the result of the one before."""
    if not any(p.top_k or p.top_p < 1.0 or p.min_p for p in (row.params for row in rows)):
        return scores
    vocab_size = scores.shape[-1]
    order = mx.argsort(-scores, axis=-1)
    ranked = mx.take_along_axis(scores, order, axis=-1)
    top_k = _column([row.params.top_k or vocab_size for row in rows])
    ranked = mx.where(mx.arange(vocab_size)[None] < top_k, ranked, -mx.inf)
    probabilities = mx.softmax(ranked, axis=-1, precise=True)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    top_p = _column([_top_p(row.params.top_p) for row in rows])
    floor = _column([row.params.min_p for row in rows]) * probabilities[:, :1]
    keep = (before < top_p) & (probabilities >= floor)
    ranked = mx.where(keep, ranked, -mx.inf)
    return mx.put_along_axis(mx.full(scores.shape, -mx.inf), order, ranked, axis=-1)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _top_p(value: float) -> float:
    """The bound on the sum before a token: 0 still keeps the likeliest, 1 keeps all."""
    return 2.0 if value >= 1.0 else max(value, 1e-9)  # 2: rounding may push the sum over 1
