"""Models that the daemon serves: budget, loading, residency; and those that it could serve."""
