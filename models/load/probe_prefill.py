"""Whether a loaded model prefills several prompts in one call as it does one by one."""

from collections.abc import Callable
from functools import partial

from ..attention.prompt_layers import Together
from ..errors import NotBatchableError
from ..kv.layout import CacheLayout
from ..kv.sequence_cache import SequenceCache
from ..prefill import prefill
from .device import DevicePolicy
from .faults import explain
from .trials import PROBED, Outcome, Trials, difference, states_of

_LONG = (*(6, 7, 8, 9, 10, 11) * 10, 12)
_CHUNKS = (_LONG, (9, 3, 1), (2, 9, 4, 1))


def prefills_together(trials: Trials, device: DevicePolicy, *, layers_attend: bool) -> Together:
    """Try out whether rows of different lengths leave the state that they leave alone, and how.

    Models treat padding in many ways, so this is measured. The state that is left, and the logits
    of a token more, may differ from those of prompts computed one by one by the model's own
    rounding; see `Trials.rounding`. Some rows have tokens of their own that nothing has stored,
    and some have none. With masks both read together what they share, and rows whose keys lie in
    one piece read all by themselves, as wide ones do; see `prompt_layers`.

    Models with recurrent layers are not tried: what padding does to a recurrent state differs by
    architecture, and mlx-lm 0.32.2 tells some of them no lengths (ml-explore/mlx-lm#1908).

    Args:
        trials: of the model.
        device: how attention is computed.
        layers_attend: rows of a batch are attended to by the layers when the model decodes. What
            another one does with latents may differ by how many there are (deepseek_v32 chooses
            among more than 2,048), which no short trial shows.
    """
    if trials.layout.has_recurrences:
        return Together.NEVER
    ways = (Together.MASKED, Together.LATENT) if layers_attend else (Together.MASKED,)
    return next((way for way in ways if _as_alone(trials, device, way)), Together.NEVER)


def _as_alone(trials: Trials, device: DevicePolicy, way: Together) -> bool:
    """True if prompts leave together what they leave alone, within rounding."""

    def after(
        held: Callable[[SequenceCache], SequenceCache] = _as_it_is, *, together: bool
    ) -> Outcome:
        caches = list(map(held, trials.prefilled(PROBED)))
        parts = list(zip(_CHUNKS, caches, strict=True))
        for call in [parts] if together else [[part] for part in parts]:
            prefill(trials.model, call, device, way)
        logits = trials.next_logits(caches)
        return Outcome(logits, states_of(caches, [len(tokens) + 1 for tokens in _CHUNKS]))

    kinds: list[Callable[[SequenceCache], SequenceCache]]
    kinds = [_as_it_is, partial(_stored, trials.layout)]
    if way is Together.MASKED:
        kinds.append(_in_one_piece)
    try:
        found = [after(held, together=True) for held in kinds]
    except NotBatchableError:
        return False
    except (AttributeError, TypeError, ValueError) as error:
        explain(error)
        return False
    alone = after(together=False)
    return all(difference(together, alone).within(trials.rounding) for together in found)


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
