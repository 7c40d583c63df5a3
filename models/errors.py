"""What can go wrong between a name and a model that answers."""


class ModelError(Exception):
    """A model cannot be served; the message says why and what to do."""


class ModelNotFoundError(ModelError):
    """The name leads to no model."""


class DownloadError(ModelNotFoundError):
    """The model could not be fetched."""


class DownloadStoppedError(DownloadError):
    """Somebody stopped the download; what has arrived is kept."""


class ModelLoadError(ModelError):
    """The model is there, but cannot be loaded."""


class UnsupportedCacheError(ModelLoadError):
    """A layer keeps its state in a class that is not known here."""


class NotBatchableError(Exception):
    """These layer states, or what the model does with them, cannot run as rows of a batch."""


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
    """An answer cannot be held to what was asked for.

    Attributes:
        place: where in the schema the fault lies, as `properties.city.pattern`; empty for all of
            it, or where there is no schema.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(f"{place}: {message}" if place else message)
        self.place = place


class MatcherError(RuntimeError):
    """A grammar could not be followed on; the message says why."""
