"""What is known of a model without loading it."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..memory_profile import MemoryProfile, StateSizes
from ..params import KVQuantization
from .config import ModelConfig
from .folder import require_regular
from .layers import state_sizes
from .profile import estimated_profile
from .weights import Weights, weights_of

_FP32 = 4
_SCALE_AND_BIAS = 2  # numbers that a group of quantised ones shares


class ModelFacts(NamedTuple):
    """What memory depends on.

    Attributes:
        config: the model's.
        weights: its weights.
    """

    config: ModelConfig
    weights: Weights

    def resident(self, *, fp32: bool) -> int:
        """Bytes of the weights in memory; as fp32 where the device has no other fast type."""
        return self.weights.fp32 if fp32 else self.weights.nbytes

    def profile(self, *, fp32: bool, quantization: KVQuantization | None = None) -> MemoryProfile:
        """Estimate what running it takes.

        Args:
            fp32: it computes on a CPU, in fp32.
            quantization: of keys and values, if they are quantised.
        """
        width = _FP32 if fp32 else self.weights.width
        sizes = state_sizes(self.config, width)
        if quantization is not None:
            sizes = _quantised(sizes, width, quantization)
        return estimated_profile(self.config, sizes, width, fused=not fp32)


def read_facts(directory: Path) -> ModelFacts:
    """Read a model's configuration and the headers of its weights.

    Raises:
        ModelError: there is no model, or its files cannot be read.
    """
    require_regular(directory)
    config = ModelConfig.read(directory)
    return ModelFacts(config, weights_of(directory, config))


def _quantised(sizes: StateSizes, width: int, quantization: KVQuantization) -> StateSizes:
    bits, group = quantization
    numbers = sizes.token // width
    token = numbers * bits // 8 + numbers // group * _SCALE_AND_BIAS * width
    return replace(sizes, token=token)
