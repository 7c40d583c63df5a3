"""The one internal request that a body of any protocol becomes."""

from abc import abstractmethod

import msgspec

from ...models.params import SamplingParams
from ...models.text.conversation import Constraint, Conversation
from ..http.decoding import ModelBody
from ..http.failures import APIError
from ..requests.workers import Check

Prompt = Conversation | str | list[int]
"""What is answered: a conversation, text, or token ids."""

MAX_ANSWERS = 128
"""Answers of one request: its prompts times `n`."""


MAX_LOGPROBS = 320
"""Log-probabilities that a request may ask for in each place: its answers times the likeliest."""


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What a client wants generated, whatever protocol it speaks.

    Attributes:
        prompts: at least one; several only for text completions.
        sampling: how tokens are chosen. The answers of one prompt differ in their seeds.
        n: answers of each prompt.
        max_tokens: of each answer; None for what the context has room for.
        stops: sequences that end an answer's content.
        constraint: what the content must match.
    """

    prompts: list[Prompt]
    sampling: SamplingParams
    n: int = 1
    max_tokens: int | None = None
    stops: list[str] = []
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        """Bound the answers."""
        if len(self.prompts) * self.n > MAX_ANSWERS:
            message = f"prompts times n is over {MAX_ANSWERS}; send fewer in one request"
            raise APIError(400, message, param="n")
        if len(self.prompts) * self.n * (self.sampling.top_logprobs or 0) > MAX_LOGPROBS:
            message = (
                f"prompts times n times the number of log-probabilities is over {MAX_LOGPROBS}; "
                "send fewer prompts in one request, or ask for fewer answers or log-probabilities"
            )
            raise APIError(400, message, param="logprobs")


class GenerationBody(ModelBody, kw_only=True):
    """A decoded body that asks for answers. Unknown fields are ignored, as the SDKs expect."""

    stream: bool | None = None

    @abstractmethod
    def generation_request(self, check: Check) -> GenerationRequest:
        """Read the whole body, on a worker's thread.

        Args:
            check: called between two stages; raises what ends the work.

        Raises:
            APIError: 400, naming the field at fault.
        """

    def sets(self, field: str) -> bool:
        """Whether the body says something in a field."""
        return getattr(self, field, None) is not None

    @property
    def conversation_name(self) -> str | None:
        """What the body calls its conversation, if it does."""
        return None

    @property
    def previous_response(self) -> str | None:
        """The id of the response that the body goes on with, if it does."""
        return None

    @property
    def session_name(self) -> str | None:
        """What the body calls its agent's session, if it does."""
        return None

    @property
    def flex(self) -> bool:
        """Whether the body asks to be served when there is nothing more urgent."""
        return False

    @property
    def least_characters(self) -> int:
        """How many characters the prompt has at least, known before it is decoded."""
        return 0

    @property
    def kept_bytes(self) -> int:
        """How many bytes of the body, once it is read, stay until its answers have ended."""
        return 0

    def release(self) -> None:
        """Let go of the body's bytes, once its prompts are tokens."""


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse what names tokens beyond the vocabulary.

    Raises:
        APIError: 400 for a top_k or a logit_bias.
    """
    if params.top_k > vocab_size:
        message = (
            f"top_k is {params.top_k}, but the model has {vocab_size} tokens; send at most that"
        )
        raise APIError(400, message, param="top_k")
    for token in params.logit_bias:
        if not 0 <= token < vocab_size:
            message = (
                f"logit_bias names token {token}, but the model's tokens are 0 to {vocab_size - 1}"
            )
            raise APIError(400, message, param="logit_bias")


def unsupported(field: str, advice: str) -> APIError:
    """Say that a field would change the answer and cannot be honoured."""
    message = f"{field} is not supported; {advice}"
    return APIError(400, message, code="unsupported_parameter", param=field)
