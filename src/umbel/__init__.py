"""umbel serves many LLM agents from one shared prompt on MLX."""

from importlib.metadata import version

__version__ = version("umbel")
