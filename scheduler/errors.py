"""How a request can end other than well. Each message is written for the client."""


class RequestError(Exception):
    """A request ends with an error of its own; its neighbours do not notice."""


class InvalidRequestError(RequestError):
    """The request can never be served as it is."""


class ContextLengthExceededError(InvalidRequestError):
    """Prompt and answer do not fit the model's context."""

    def __init__(self, message: str, *, tokens: int, most: int) -> None:
        super().__init__(message)
        self.tokens = tokens  # of the prompt; if it was not tokenised, it has at least these
        self.most = most  # tokens that a prompt may have


class RetryLaterError(RequestError):
    """The request is fine and the moment is not: it may be tried again in `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(RetryLaterError):
    """As many requests wait as may wait."""


class QuotaSpentError(RetryLaterError):
    """The tenant has spent its tokens of this minute."""


class UnavailableError(RetryLaterError):
    """The daemon is loading its model, or stopping."""


class DeadlineExceededError(RequestError):
    """The request was not finished by its deadline."""


class SlowConsumerError(RequestError):
    """The client read its answer so slowly that too much of it was waiting."""


class ComputationError(RequestError):
    """The model, the sampler or the detokeniser raised on this request."""
