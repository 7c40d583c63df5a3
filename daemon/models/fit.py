"""Whether a model fits a machine, and with how long a context: as the daemon would find it.

The daemon measures what computing takes; here it is estimated. All else is the same arithmetic.
"""

import msgspec

from ...cachestore.ledger import max_copy_bytes
from ...models.backends.memory import DeviceMemory, gpu_memory, host_memory, mac_memory
from ...models.estimate.facts import ModelFacts
from ...models.memory_profile import MemoryProfile
from ...models.params import KVQuantization
from ..config import Settings
from ..errors import StartError
from .machine import Device, Planned
from .memory_budget import MemoryBudget

LEAST_CONTEXT = 32
"""Tokens; a budget that cannot hold these is a mistake."""


def usable(budget: int) -> int:
    """Bytes of a budget that one request may take: the rest is kept for copies."""
    return budget - max_copy_bytes(budget)


class Machine(msgspec.Struct, frozen=True):
    """What a daemon would run on.

    Attributes:
        memory: what it has.
        fp32: its CPU computes, and weights become fp32.
    """

    memory: DeviceMemory
    fp32: bool


def machine_of(planned: Planned) -> Machine:
    """Describe the machine that was asked for, or this one."""
    if planned.memory is None:
        return _this_machine()
    match planned.device or _this_device():
        case Device.MAC:
            return Machine(mac_memory(planned.memory), fp32=False)
        case Device.GPU:
            memory = gpu_memory("GPU memory", planned.memory, planned.memory)
            return Machine(memory, fp32=False)
        case Device.CPU:
            return Machine(host_memory(planned.memory), fp32=True)


def _this_machine() -> Machine:
    from ...models.backends.memory import device_memory  # noqa: PLC0415  (planning needs no MLX)

    return Machine(device_memory(), fp32=_this_device() is Device.CPU)


def _this_device() -> Device:
    from ...models.backends import device_name  # noqa: PLC0415  (planning needs no MLX)

    return {"cpu": Device.CPU, "metal": Device.MAC, "cuda": Device.GPU}[device_name()]


class Fit(msgspec.Struct, frozen=True):
    """How a model fits. All figures are bytes but the contexts, which are tokens.

    Attributes:
        weight_bytes: of the weights in memory.
        token_bytes: of a token of one sequence, in layers that keep all tokens.
        sequence_bytes: of a sequence, however long, once its windows are full.
        budget: what state may take; 0 where nothing is left.
        context: of one request that runs alone; 0 where the model does not fit.
        model_context: the most that the model was made for.
    """

    weight_bytes: int
    token_bytes: int
    sequence_bytes: int
    budget: int
    context: int
    model_context: int

    @property
    def fits(self) -> bool:
        """Whether a daemon with it would start."""
        return self.context > 0


def fit(facts: ModelFacts, machine: Machine, settings: Settings) -> Fit:
    """Estimate how a model fits a machine.

    Args:
        facts: of the model.
        machine: it would run on.
        settings: of the daemon: its budgets, and how keys and values are kept.
    """
    weights, budget, profile = _sizes(facts, machine, settings)
    longest = profile.longest_context(usable(budget))
    context = min(longest, facts.config.context_length)
    if longest < min(LEAST_CONTEXT, facts.config.context_length):
        context = 0
    return Fit(
        weight_bytes=weights,
        token_bytes=profile.sizes.token,
        sequence_bytes=profile.sizes.in_windows(1 << 40) + profile.sizes.fixed,
        budget=budget,
        context=context,
        model_context=facts.config.context_length,
    )


def agents(
    facts: ModelFacts, machine: Machine, settings: Settings, *, shared: int, own: int
) -> int:
    """Estimate how many agents' conversations fit in memory at a time.

    Args:
        facts: of the model.
        machine: it would run on.
        settings: of the daemon.
        shared: tokens of the prompt that all begin with, which is kept once.
        own: tokens of each conversation.

    Returns:
        How many; 0 where none can be served. What is more goes to the disk and comes back.
    """
    _, budget, profile = _sizes(facts, machine, settings)
    sizes = profile.sizes
    left = usable(budget) - profile.worst_case(shared + own).nbytes
    if left < 0 or shared + own > facts.config.context_length:
        return 0
    # The first is the one that runs; of the others tokens are kept, and checkpoints.
    checkpoint = sizes.in_windows(shared + own) + sizes.fixed
    each = sizes.suffix(own) + (1 + settings.checkpoints_kept) * checkpoint
    return 1 + left // max(1, each)


def _sizes(
    facts: ModelFacts, machine: Machine, settings: Settings
) -> tuple[int, int, MemoryProfile]:
    weights = facts.resident(fp32=machine.fp32)
    try:
        budget = MemoryBudget(settings, machine.memory).enter("", weights)
    except StartError:
        budget = 0
    quantization = None
    if settings.kv_bits is not None:
        quantization = KVQuantization(settings.kv_bits, settings.kv_group_size)
    return weights, budget, facts.profile(fp32=machine.fp32, quantization=quantization)
