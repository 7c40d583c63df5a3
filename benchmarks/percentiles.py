"""Percentiles, as all benchmarks count them."""


def percentile(values: list[float], share: float) -> float:
    """The value below which a share of them lies; NaN if there are none."""
    if not values:
        return float("nan")
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
