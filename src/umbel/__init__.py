"""umbel serves many LLM agents from one shared prompt on MLX."""


def __getattr__(name: str) -> str:
    """Look `__version__` up when it is asked for: signals are to be handled before that."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version  # noqa: PLC0415  (takes as long as Python's start)

    return version("umbel")
