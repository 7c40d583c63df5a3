"""Whether a loaded model prefills several prompts in one call as it does one by one."""

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from ..attention.prompt_layers import Together
from ..errors import NotBatchableError
from ..kv.layout import CacheLayout
from ..kv.sequence_cache import SequenceCache
from ..prefill import prefill
from .device import DevicePolicy
from .faults import explain
from .probe import BOUND, MARGIN
from .trials import PROBED, Trials, deviation

_CHUNKS = ((6, 7, 8, 9, 10, 11, 12), (9, 3), (2, 9, 4, 1))
_NEIGHBOURS = ((6, 7, 8, 9, 10, 11, 12), (4, 8), (7, 3, 3, 8, 1, 2, 5, 6, 9))


def prefills_together(trials: Trials, device: DevicePolicy, *, layers_attend: bool) -> Together:
    """Try out whether rows of different lengths leave the state that they leave alone, and how.

    Models treat padding in many ways (some recurrent layers have no mask for it), so this is
    measured. The logits of a token more may differ from those of prompts computed one by one by
    the model's own rounding: by how much it differs from itself where a prompt is cut. Rows are
    tried that have tokens of their own which nobody has stored, and rows that have none. With masks
    both read together what they share, and rows whose keys lie in one piece read all by themselves,
    as wide ones do; see `prompt_layers`.

    Args:
        trials: of the model.
        device: how attention is computed.
        layers_attend: rows of a batch are attended to by the layers when the model decodes. What
            another one does with latents may differ by how many there are (deepseek_v32 chooses
            among more than 2,048), which no short trial shows.
    """
    ways = (Together.MASKED, Together.LATENT) if layers_attend else (Together.MASKED,)
    return next((way for way in ways if _as_alone(trials, device, way)), Together.NEVER)


def _as_alone(trials: Trials, device: DevicePolicy, way: Together) -> bool:
    """Whether prompts that are computed together leave what they leave alone, but for rounding."""

    def after(
        chunks: tuple[tuple[int, ...], ...],
        *,
        together: bool,
        held: Callable[[SequenceCache], SequenceCache] = _as_it_is,
        cut: int = 0,
    ) -> mx.array:
        caches = list(map(held, trials.prefilled(PROBED)))
        parts = list(zip(chunks, caches, strict=True))
        for calls in [parts] if together else [[part] for part in parts]:
            if cut:
                prefill(
                    trials.model, [(tokens[:cut], cache) for tokens, cache in calls], device, way
                )
            prefill(trials.model, [(tokens[cut:], cache) for tokens, cache in calls], device, way)
        return trials.next_logits(caches)

    kinds: list[Callable[[SequenceCache], SequenceCache]]
    kinds = [_as_it_is, partial(_stored, trials.layout)]
    if way is Together.MASKED:
        kinds.append(_in_one_piece)
    try:
        found = [
            (
                after(_CHUNKS, together=True, held=held),
                after(_NEIGHBOURS, together=True, held=held),
            )
            for held in kinds
        ]
    except NotBatchableError:
        return False
    except (AttributeError, TypeError, ValueError) as error:
        explain(error)
        return False
    alone = after(_CHUNKS, together=False)
    furthest = max(
        max(deviation(together, alone), deviation(beside[:1], alone[:1]))
        for together, beside in found
    )
    if furthest < BOUND:
        return True
    rounding = deviation(after(_CHUNKS, together=False, cut=1), alone)
    return furthest < max(BOUND, MARGIN * rounding)


def _as_it_is(cache: SequenceCache) -> SequenceCache:
    """Have a sequence with tokens of its own."""
    return cache


def _in_one_piece(cache: SequenceCache) -> SequenceCache:
    """Have a sequence's keys in one piece, all of its own."""
    cache.make_contiguous()
    return cache


def _stored(layout: CacheLayout, cache: SequenceCache) -> SequenceCache:
    """Have a sequence lease all of its tokens, as one does whose prompt was met before."""
    checkpoint = cache.capture() if layout.has_checkpoints else None
    return layout.open(cache.offset, [*cache.leased, *cache.take_packed()], checkpoint)
