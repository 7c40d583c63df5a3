"""Attention of several prompts to what they share, and each to its own tokens.

As in a step of decoding (see `batched`), but each row has several queries: the number of operations
depends on the shared prefixes, and hardly on the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..kv.alignment import aligned
from ..kv.prefix_groups import prefix_groups
from ..kv.read_alone import room_for
from ..kv.sequence_cache import SequenceCache
from ..kv.spans import SpanRun, runs_of
from ..load.device import DevicePolicy
from .cascade import merge, part_of, scores_of, spread, together
from .products import Segment
from .softmax import softmaxes


@dataclass
class Prompts:
    """What all layers must know of a call.

    Attributes:
        shared: runs that are read where they lie, each with the numbers of the rows that read
            them; None for all of them.
        few: runs of few tokens that all rows lease; see `kv/alignment.py`.
        alone: runs that are copied for a row that reads them alone.
        before: tokens that each row reads alone, before `few` and those of the call.
        room: at least as many as the most of these; what is over is padding.
        mask: `[rows, 1, tokens, room + few + tokens]`, where a row's queries may look in what it
            reads by itself.
    """

    shared: list[tuple[list["SpanRun | Suffix"], mx.array | None]] = field(default_factory=list)
    few: list[SpanRun] = field(default_factory=list)
    alone: dict[int, list["SpanRun | Suffix"]] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)
    room: int = 0
    mask: mx.array = field(default_factory=lambda: mx.array([True]))


class Suffix:
    """Tokens that a sequence has of its own before the call, read as a run of spans is.

    They are read where its caches have them once the call's are written: before, the write would be
    a copy.

    Attributes:
        length: how many.

    Args:
        cache: of the sequence.
        start: the first of them in its suffix.
        stop: one after the last of them.
    """

    def __init__(self, cache: SequenceCache, start: int, stop: int) -> None:
        self.length = stop - start
        self._cache = cache
        self._start = start

    def layer(self, index: int) -> Segment:
        """One layer's tensors, `[1, kv_heads, tokens, size]` each."""
        tensors = self._cache.token_layers[index].suffix_tensors()
        tokens = slice(self._start, self._start + self.length)
        return tuple(tensor[..., tokens, :] for tensor in tensors)

    def between(self, start: int, stop: int) -> "Suffix":
        """Some of them."""
        return Suffix(self._cache, self._start + start, self._start + stop)


def prompts_of(caches: Sequence[SequenceCache], tokens: int, device: DevicePolicy) -> Prompts:
    """Find what prompts share.

    Where products of other lengths are slow, each row reads the few tokens by itself that would
    make them so.

    Args:
        caches: of their sequences.
        tokens: of each row in the call, padding included.
        device: how attention is computed.
    """
    found = Prompts(before=[0] * len(caches))

    def alone(row: int, runs: Sequence[SpanRun | Suffix]) -> None:
        found.alone.setdefault(row, []).extend(runs)
        found.before[row] += sum(run.length for run in runs)

    prefixes = [cache.prefix for cache in caches]
    for rows, start, stop in prefix_groups(dict(enumerate(prefixes))):
        spans = prefixes[rows[0]][start:stop]
        if len(rows) > 1:
            members = None if len(rows) == len(caches) else mx.array(rows)
            runs, rests = aligned(runs_of(spans), device.length_multiple)
            if runs:
                found.shared.append(([*runs], members))
            if members is None:
                found.few += rests
                continue
            # What only some lease is not shown to others, not even with no weight: see
            # `RingBuffer.wipe`.
            for row in rows if rests else ():
                alone(row, rests)
        else:
            alone(rows[0], runs_of(spans))
    for row, cache in enumerate(caches):
        if cache.suffix_length:
            alone(row, [Suffix(cache, 0, cache.suffix_length)])
    _read_apart(found, room_for(found.before), device)
    all_read = sum(run.length for run in found.few) + tokens
    found.room = max(found.before)
    found.room += -(found.room + all_read) % device.length_multiple
    columns, before = np.arange(found.room + all_read), np.array(found.before)
    seen = np.tri(tokens, len(columns), len(columns) - tokens, np.bool_)
    own = columns[None] >= found.room - before[:, None]
    found.mask = mx.array(seen[None, None] & own[:, None, None])
    return found


def _read_apart(prompts: Prompts, room: int, device: DevicePolicy) -> None:
    """Have rows read where it lies what they read alone, where that is more than there is room for.

    Args:
        prompts: what has been found.
        room: tokens that each row copies at most.
        device: says which lengths products are fast for. What is over is copied all the same.
    """
    for row, before in enumerate(prompts.before):
        if before <= room:
            continue
        whole, rests = aligned(prompts.alone.pop(row), device.length_multiple)
        prompts.shared.append((whole, mx.array([row])))
        prompts.before[row] = sum(run.length for run in rests)
        if rests:
            prompts.alone[row] = rests


def own_tensors(prompts: Prompts, index: int, new: Segment) -> Segment:
    """Put what each row reads by itself side by side.

    Args:
        prompts: the call.
        index: of the layer, among those that spans hold.
        new: keys and values of the call, `[rows, kv_heads, tokens, size]`.
    """
    few = [run.layer(index) for run in prompts.few]
    tensors = [*([_alone(prompts, index, new)] if prompts.room else []), *few, new]
    if len(tensors) == 1:
        return new
    rows = new[0].shape[0]
    return tuple(
        mx.concatenate([mx.broadcast_to(x, (rows, *x.shape[1:])) for x in parts], axis=2)
        for parts in zip(*tensors, strict=True)
    )


def _alone(prompts: Prompts, index: int, new: Segment) -> Segment:
    """Copy what each row leases alone, to the end of the room for it."""
    wide = [mx.zeros((*x.shape[:2], prompts.room, x.shape[3]), x.dtype) for x in new]
    for row, runs in prompts.alone.items():
        at = prompts.room - prompts.before[row]
        for run in runs:
            for tensor, part in zip(wide, run.layer(index), strict=True):
                tensor[row : row + 1, :, at : at + run.length] = part
            at += run.length
    return tuple(wide)


def shared_segments(prompts: Prompts, index: int) -> list[list[Segment]]:
    """What rows share, `[1, kv_heads, tokens, size]` each, for each of `Prompts.shared`.

    Args:
        prompts: the call.
        index: of the layer, among those that spans hold.
    """
    return [[run.layer(index) for run in runs] for runs, _ in prompts.shared]


def attend_jointly(
    prompts: Prompts,
    shared: Sequence[Sequence[Segment]],
    own: Segment,
    queries: mx.array,
    sinks: mx.array | None,
    device: DevicePolicy,
) -> mx.array:
    """Compute attention of all rows.

    Args:
        prompts: the call.
        shared: what rows share, as `shared_segments` gives it.
        own: what each row reads by itself, as `own_tensors` gives it.
        queries: `[rows, heads, tokens, size]`, scaled.
        sinks: `[heads]`, or None.
        device: how it is computed.

    Returns:
        `[rows, heads, tokens, size of a value]`.
    """
    rows, heads, tokens, size = queries.shape
    kv_heads = own[0].shape[1]
    grouped = queries.reshape(rows, kv_heads, -1, size)
    scores = [
        scores_of(together((grouped,), members), segments)
        for segments, (_, members) in zip(shared, prompts.shared, strict=True)
    ]
    alone = scores_of((grouped,), [own])
    by_head = alone.reshape(rows, heads, tokens, -1)
    masked = mx.where(prompts.mask, by_head, -mx.inf).reshape(alone.shape)
    softmaxed = softmaxes([*scores, masked], device)
    *parts, last = [
        part_of(softmax, segments)
        for softmax, segments in zip(softmaxed, [*shared, [own]], strict=True)
    ]
    back = [
        spread(part, members, grouped.shape)
        for part, (_, members) in zip(parts, prompts.shared, strict=True)
    ]
    each = None if sinks is None else mx.repeat(sinks, tokens)
    output = merge([*back, last], each, device)
    return output.astype(queries.dtype).reshape(rows, heads, tokens, -1)
