"""What `/metrics` says, as a mapping."""

from prometheus_client.parser import text_string_to_metric_families

from umbel.daemon.metrics import Metrics


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Read all samples, by name and the values of the labels, in the order of their names."""
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, *(s.labels[key] for key in sorted(s.labels))): s.value for s in found}


def measured_by(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Read what a daemon with these metrics would say."""
    return samples(metrics.render().decode())
