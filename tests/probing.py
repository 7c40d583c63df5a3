"""How well an observer tells two kinds of tries apart."""

import math
from collections.abc import Sequence


def auc(hits: Sequence[float], misses: Sequence[float]) -> float:
    """The chance that one of `hits` is the smaller of a pair; one half if nothing is to be told."""
    smaller = sum(hit < miss for hit in hits for miss in misses)
    equal = sum(hit == miss for hit in hits for miss in misses)
    return (smaller + equal / 2) / (len(hits) * len(misses))


def chance(hits: int, misses: int) -> float:
    """How far from one half `auc` may be by chance: once in 15,000 tries of a true half."""
    return 4 * math.sqrt((hits + misses + 1) / (12 * hits * misses))
