"""Status, metrics, logs, and views of the cache."""
