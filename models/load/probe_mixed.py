"""Whether a loaded model computes in a mixed step what it computes in calls of their own."""

from collections.abc import Sequence

import mlx.core as mx

from ..errors import NotBatchableError
from ..kv.batch_cache import BatchCache
from ..kv.placement import Placement
from ..kv.sequence_cache import SequenceCache
from ..mixed_call import MixedCall
from ..output_rows import OutputRows
from ..planned_for import Rules
from .device import DevicePolicy
from .faults import explain
from .probe import decoded
from .trials import PROBED, Trials, allowed, deviation

_PROMPTS = ((6, 7, 8, 9, 10), (9, 3))


def mixes(trials: Trials, device: DevicePolicy, outputs: OutputRows) -> bool:
    """Try out whether prompts and rows of a batch get from one call what they get alone.

    A batch is tried beside two prompts that have no tokens of their own yet, and beside two of
    which one has, and a sequence that decodes alone beside one prompt that has, which is computed
    in another way; see `prompt_layers`. Models whose state cannot resume at any token
    are not tried: a checkpoint is due before a prompt's last token, which is computed here with
    the others.

    Args:
        trials: of the model; its rows decode in batches, its prompts are computed together, with
            masks.
        device: how it is run.
        outputs: of the model.
    """
    if not device.mixes or trials.layout.has_checkpoints:
        return False

    def deviates(decoding: int, held: Sequence[int]) -> float:
        rows, beside = _sequences(trials, decoding, held)
        together = _mixed(trials, device, outputs, rows, beside)
        _, beside = _sequences(trials, decoding, held)
        ends = [
            trials.forward(cache, own)[:, -1] for own, cache in zip(_PROMPTS, beside, strict=False)
        ]
        alone = [trials.alone.logits[0, :decoding], *ends, trials.next_logits(beside)]
        return deviation(together, mx.concatenate(alone))

    try:
        bound = allowed(trials.rounding.logits)
        return all(deviates(*trial) <= bound for trial in ((3, (0, 0)), (3, (2, 0)), (1, (3,))))
    except NotBatchableError:
        return False
    except Exception as error:  # noqa: BLE001  (without, the model is served all the same)
        explain(error)
        return False


def _sequences(
    trials: Trials, decoding: int, held: Sequence[int]
) -> tuple[list[SequenceCache], list[SequenceCache]]:
    """Some that decode, and some whose prompts are computed beside them.

    Args:
        trials: as above.
        decoding: how many decode.
        held: of each of the others, tokens that it has of its own.
    """
    rows, layout = trials.prefilled(PROBED), trials.layout
    first = rows[0]
    beside = [layout.open(first.offset - first.suffix_length, first.leased) for _ in held]
    for cache, tokens in zip(beside, held, strict=True):
        if tokens:
            trials.forward(cache, [*range(1, 1 + tokens)])
    return rows[:decoding], beside


def _mixed(
    trials: Trials,
    device: DevicePolicy,
    outputs: OutputRows,
    rows: list[SequenceCache],
    beside: list[SequenceCache],
) -> mx.array:
    """Logits of a mixed step, and then of a token more of its prompts, `[rows, V]`."""
    chunks = list(zip(_PROMPTS, beside, strict=False))
    mixed = MixedCall(trials.model, range(len(rows)), chunks, device, outputs)
    tokens = PROBED.decoded[0][: len(rows)]
    if len(rows) == 1:
        logits = mixed(mx.array([tokens]), cache=rows[0].layers)[:, -1]
    else:
        rules = Rules(own=2)
        batch = BatchCache(trials.layout.open().layers, device, row_limit=rules.row_limit)
        logits = decoded(mixed, Placement(trials.layout, batch), rows, rules, tokens)
    mx.eval(logits, mixed.advanced())
    return mx.concatenate([logits, mixed.logits, trials.next_logits(beside)])
