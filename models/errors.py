"""What can go wrong between a name and a model that answers."""


class ModelError(Exception):
    """A model cannot be served; the message says why and what to do."""


class ModelNotFoundError(ModelError):
    """The name leads to no model."""


class ModelLoadError(ModelError):
    """The model is there, but cannot be loaded."""


class UnsupportedCacheError(ModelLoadError):
    """A layer keeps its state in a class that is not known here."""


class StoredStateError(ValueError):
    """A file does not hold the state that was saved in it."""


class UnreadableStateError(OSError):
    """A file of saved state cannot be read at present; it may be whole."""


class TemplateError(ValueError):
    """The model's chat template refuses these messages."""
