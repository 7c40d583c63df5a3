"""The models of a daemon: budget, loading and unloading; and models that could be served."""
