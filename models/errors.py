"""Errors of models: of their names, files, state, templates and grammars."""


class ModelError(Exception):
    """A model cannot be served; the message says why and what to do."""


class ModelNotFoundError(ModelError):
    """The name leads to no model."""


class DownloadError(ModelNotFoundError):
    """The model could not be fetched."""


class DownloadStoppedError(DownloadError):
    """The download was stopped; the part that has arrived is kept."""


class ModelLoadError(ModelError):
    """The model is there, but cannot be loaded."""


class UnsupportedCacheError(ModelLoadError):
    """A layer keeps its state in an unknown class."""


class NotBatchableError(Exception):
    """A model's layer states, or its use of them, cannot run as rows of a batch."""


class StoredStateError(ValueError):
    """A file does not hold the state that was saved in it."""


class UnreadableStateError(OSError):
    """A file of saved state cannot be read at present; it may be whole."""


class StateLostError(RuntimeError):
    """A step failed under a sequence, and its state is lost."""


class TemplateError(ValueError):
    """The model's chat template refuses these messages."""


class TemplateTimeoutError(RuntimeError):
    """The model's chat template takes too long for these messages."""


class GrammarError(ValueError):
    """A requested grammar or schema is not supported.

    Attributes:
        place: of the fault in the schema, as `properties.city.pattern`; empty for all of it, or
            where there is no schema.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(f"{place}: {message}" if place else message)
        self.place = place


class MatcherError(RuntimeError):
    """A grammar's matcher failed; the message says why."""
