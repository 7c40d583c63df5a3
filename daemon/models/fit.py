"""Fit of a model on a machine, and its context: the daemon's arithmetic on estimated sizes.

The daemon measures the memory of computing; here it is estimated. All else is the same.
"""

import msgspec

from ...cachestore.ledger import max_copy_bytes
from ...models.backends.memory import DeviceMemory, gpu_memory, host_memory, mac_memory
from ...models.estimate.facts import ModelFacts
from ...models.memory_profile import MemoryProfile
from ...models.params import KVQuantization
from ..config import Settings
from ..config.setting import Size, parse_size
from ..errors import FlagError

LEAST_CONTEXT = 32
"""Tokens; a budget that cannot hold these is a mistake."""

_STATE_SHARE = 4  # if models share memory, weights never get one part in this many

_DEVICES = {"metal": "mac", "cuda": "gpu", "cpu": "cpu"}


def request_budget(budget: int) -> int:
    """Return the bytes of a budget that one request may take; the rest is for copies."""
    return budget - max_copy_bytes(budget)


def usable_bytes(settings: Settings, device: DeviceMemory) -> int:
    """Return the bytes for weights and state of all models."""
    left = device.budget(0, settings.body_budget)
    return left if settings.memory_budget is None else settings.memory_budget


def state_share(settings: Settings, usable: int) -> int:
    """Return the bytes that weights leave to state if several models share memory."""
    return usable // _STATE_SHARE if settings.cache_budget is None else settings.cache_budget


def state_budget(settings: Settings, usable: int, weights: int) -> int:
    """Return the least bytes of state beside a model's weights; 0 or less if nothing is left."""
    if settings.cache_budget is not None:
        return settings.cache_budget
    alone = usable - weights
    return min(alone, state_share(settings, usable)) if settings.models else alone


class Machine(msgspec.Struct, frozen=True):
    """A machine for a daemon.

    Attributes:
        memory: of its device.
        fp32: its CPU computes, and weights become fp32.
    """

    memory: DeviceMemory
    fp32: bool


def machine_of(memory: str | None = None, device: str | None = None) -> Machine:
    """Describe a machine.

    Args:
        memory: its size, such as 64GiB; None for this machine.
        device: `mac`, `gpu` or `cpu`; None for this machine's.

    Raises:
        FlagError: a value is of no use, or a device has no memory.
    """
    if device not in (None, *_DEVICES.values()):
        raise FlagError(f"--device is {device!r}; it must be mac, gpu or cpu")
    if memory is None:
        if device is not None:
            raise FlagError("--device needs --memory: how much has that machine?")
        from ...models.backends.memory import device_memory  # noqa: PLC0415  (planning needs no MLX)

        return Machine(device_memory(), fp32=_this_device() == "cpu")
    try:
        nbytes = parse_size(msgspec.convert(memory, Size))
    except msgspec.ValidationError as error:
        raise FlagError(f"--memory is {memory!r}; it must be a size: 64GiB, 64GB") from error
    match device or _this_device():
        case "mac":
            return Machine(mac_memory(nbytes), fp32=False)
        case "gpu":
            return Machine(gpu_memory("GPU memory", nbytes, nbytes), fp32=False)
        case _:
            return Machine(host_memory(nbytes), fp32=True)


def _this_device() -> str:
    from ...models.backends import device_name  # noqa: PLC0415  (planning needs no MLX)

    return _DEVICES[device_name()]


class Fit(msgspec.Struct, frozen=True):
    """Sizes of a model on a machine. Figures are bytes; contexts are tokens.

    Attributes:
        weight_bytes: of the weights in memory.
        token_bytes: of a token of one sequence, in layers that keep all tokens.
        sequence_bytes: of a sequence of any length, once its windows are full.
        budget: of state; 0 if nothing is left.
        context: of one request that runs alone; 0 if the model does not fit.
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
        """True if a daemon with it would start."""
        return self.context > 0


def fit(facts: ModelFacts, machine: Machine, settings: Settings) -> Fit:
    """Estimate the fit of a model.

    Args:
        facts: of the model.
        machine: for the daemon.
        settings: of the daemon: its budgets, and the form of keys and values.
    """
    weights, budget, profile = _sizes(facts, machine, settings)
    longest = profile.longest_context(request_budget(budget))
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
    """Estimate the number of conversations in memory at a time; others go to the disk and back.

    Args:
        facts: of the model.
        machine: for the daemon.
        settings: of the daemon.
        shared: tokens of their common prefix, which is kept once.
        own: further tokens of each conversation.

    Returns:
        0 if no conversation fits.
    """
    _, budget, profile = _sizes(facts, machine, settings)
    sizes = profile.sizes
    left = request_budget(budget) - profile.worst_case(shared + own).nbytes
    if left < 0 or shared + own > facts.config.context_length:
        return 0
    # The first one runs; of the others tokens are kept, and checkpoints.
    checkpoint = sizes.in_windows(shared + own) + sizes.fixed
    each = sizes.suffix(own) + (1 + settings.checkpoints_kept) * checkpoint
    return 1 + left // max(1, each)


def _sizes(
    facts: ModelFacts, machine: Machine, settings: Settings
) -> tuple[int, int, MemoryProfile]:
    """Return the bytes of the weights, the budget of state, and the profile of requests."""
    weights = facts.resident(fp32=machine.fp32)
    budget = max(0, state_budget(settings, usable_bytes(settings, machine.memory), weights))
    quantization = None
    if settings.kv_bits is not None:
        quantization = KVQuantization(settings.kv_bits, settings.kv_group_size)
    return weights, budget, facts.profile(fp32=machine.fp32, quantization=quantization)
