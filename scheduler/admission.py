"""Whether a request can be served at all: pure, decided before it queues."""

from .errors import ContextLengthExceededError, InvalidRequestError


class Admission:
    """Checks a request against the model's limits.

    Args:
        context_length: the most tokens of prompt and answer together.
    """

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length

    def check_text(self, characters: int, longest_token: int) -> None:
        """Refuse a text that cannot fit however it is tokenised, before that is tried.

        Encoding tens of megabytes takes minutes and gigabytes.

        Raises:
            ContextLengthExceededError: it has more tokens than the context.
        """
        least = characters // longest_token
        if least > self.context_length:
            raise ContextLengthExceededError(
                f"This model's maximum context length is {self.context_length} tokens, and the "
                f"prompt has over {least}: it must leave room for an answer. Shorten the prompt."
            )

    def answer_length(self, prompt_length: int, max_tokens: int | None) -> int:
        """Say how many tokens the answer may have: what was asked for, within the context.

        A `max_tokens` that reaches beyond the context is cut, not refused: agents ask for
        a fixed large number whatever the model.

        Raises:
            InvalidRequestError: the prompt has no tokens.
            ContextLengthExceededError: the prompt leaves no room for an answer.
        """
        if prompt_length == 0:
            raise InvalidRequestError("the prompt is empty; send at least one token of text")
        room = self.context_length - prompt_length
        if room < 1:
            raise ContextLengthExceededError(
                f"This model's maximum context length is {self.context_length} tokens, and the "
                f"prompt has {prompt_length}: it must leave room for an answer. Shorten the prompt."
            )
        return room if max_tokens is None else min(max_tokens, room)
