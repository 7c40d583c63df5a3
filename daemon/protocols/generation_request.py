"""The one internal request that a body of any protocol becomes, and what all bodies share."""

import secrets
from abc import abstractmethod
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from ...models.params import SamplingParams
from ...models.text.conversation import Constraint, Conversation
from ..http.bodies import ModelBody
from ..http.failures import APIError
from ..quoting import quote
from ..requests.workers import Check

Prompt = Conversation | str | list[int]
"""A conversation, text, or token ids."""

MAX_ANSWERS = 128
"""Answers of one request: its prompts times `n`."""

MAX_LOGPROBS = 320
"""Log-probabilities that a request may ask for in each place: its answers times the likeliest."""

MAX_KEY = 256
MAX_STOP_SEQUENCES = 16
MAX_STOP_LENGTH = 1000
MAX_OPTIONS = 64

Probability = Annotated[float, Meta(ge=0, le=1)]
Tokens = Annotated[int, Meta(ge=1)]
StopSequence = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
StopSequences = Annotated[list[StopSequence], Meta(max_length=MAX_STOP_SEQUENCES)]

# Fields of bodies that have the names of sampling parameters; null leaves the default.
_SAMPLING = (
    *("temperature", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias"),
)
# Arguments of the renderer itself; and a template of the client's own would be a program.
_RESERVED_OPTIONS = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("documents", "messages", "padding", "return_dict", "return_tensors"),
        *("sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools"),
        "truncation",
    }
)


class GenerationRequest(msgspec.Struct, kw_only=True):
    """A client's request, whatever its protocol.

    Attributes:
        prompts: at least one; several only for text completions.
        sampling: how tokens are chosen. The answers of one prompt differ in their seeds.
        n: answers of each prompt.
        max_tokens: of each answer; None for all that the context has room for.
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
        answers = len(self.prompts) * self.n
        if answers > MAX_ANSWERS:
            message = f"prompts times n is over {MAX_ANSWERS}; send fewer in one request"
            raise APIError(400, message, param="n")
        if answers * (self.sampling.top_logprobs or 0) > MAX_LOGPROBS:
            message = (
                f"prompts times n times the number of log-probabilities is over {MAX_LOGPROBS}; "
                "send fewer prompts in one request, or ask for fewer answers or log-probabilities"
            )
            raise APIError(400, message, param="logprobs")


EMPTY: tuple[object, ...] = (False, "", [], {})
"""Values without content."""


class Refused(NamedTuple):
    """Stands beside the type of a field that would change the answer and is not served.

    Attributes:
        advice: what to do instead.
        neutral: values that change nothing; they are accepted, as null is.
    """

    advice: str
    neutral: tuple[object, ...] = ()


@cache
def refused_fields(kind: type[msgspec.Struct]) -> dict[str, Refused]:
    """List the fields of a struct that have a `Refused` beside their type."""
    hints = get_type_hints(kind, include_extras=True).items()
    notes = {name: note for name, hint in hints for note in getattr(hint, "__metadata__", ())}
    return {name: note for name, note in notes.items() if isinstance(note, Refused)}


def refuse(sent: msgspec.Struct, place: str = "") -> None:
    """Raise an APIError if a refused field has a value; `place` stands before the field's name."""
    for field, refused in refused_fields(type(sent)).items():
        value = getattr(sent, field)
        if value is not None and value not in refused.neutral:
            raise unsupported(f"{place}{field}", refused.advice)


def unsupported(field: str, advice: str) -> APIError:
    """Make the error for a field that would change the answer and is not served."""
    message = f"{field} is not supported; {advice}"
    return APIError(400, message, code="unsupported_parameter", param=field)


class GenerationBody(ModelBody, kw_only=True):
    """A decoded body that asks for answers. Unknown fields are ignored, as the SDKs expect."""

    stream: bool | None = None

    @abstractmethod
    def generation_request(self, check: Check) -> GenerationRequest:
        """Read the whole body, on a worker's thread.

        Args:
            check: called between two stages; raises what ends the work.
        """

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the answer and are not served."""
        refuse(self)

    def sampling(self) -> SamplingParams:
        """Make sampling parameters of the body's fields; without a seed, one is drawn."""
        seed, top_k = getattr(self, "seed", None), getattr(self, "top_k", None)
        fields = {name: getattr(self, name, None) for name in _SAMPLING}
        return SamplingParams(
            seed=secrets.randbits(64) if seed is None else seed % 2**64,
            top_k=max(top_k or 0, 0),
            top_logprobs=self.told_logprobs,
            **{name: value for name, value in fields.items() if value is not None},
        )

    def sets(self, field: str) -> bool:
        """Return True if the body has a value in a field."""
        return getattr(self, field, None) is not None

    @property
    def told_logprobs(self) -> int | None:
        """Number of likeliest tokens told beside the chosen one; None tells neither."""
        return None

    @property
    def conversation_name(self) -> str | None:
        """Name of the conversation, if the body has one."""
        return None

    @property
    def previous_response(self) -> str | None:
        """Id of the response that the body continues, if it has one."""
        return getattr(self, "previous_response_id", None)

    @property
    def session_name(self) -> str | None:
        """Name of the agent's session, if the body has one."""
        return None

    @property
    def flex(self) -> bool:
        """True if the request may wait for all that is more urgent."""
        return False

    @property
    def least_characters(self) -> int:
        """Lower bound of the prompt's characters, known before it is decoded."""
        return 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the body that stay in memory until its answers have ended."""
        return 0

    def release(self) -> None:
        """Drop the parts that are views of the body's bytes, once prompts are tokens."""


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse a top_k or a logit_bias beyond the vocabulary."""
    if params.top_k > vocab_size:
        message = (
            f"top_k is {params.top_k}, but the model has {vocab_size} tokens; send at most that"
        )
        raise APIError(400, message, param="top_k")
    if (token := _beyond(params.logit_bias, vocab_size)) is not None:
        message = (
            f"logit_bias names token {token}, but the model's tokens are 0 to {vocab_size - 1}"
        )
        raise APIError(400, message, param="logit_bias")


def check_tokens(prompt: list[int], vocab_size: int, param: str = "prompt") -> None:
    """Refuse token ids beyond the vocabulary; the message names the first."""
    if (token := _beyond(prompt, vocab_size)) is not None:
        message = f"token {token} does not exist; there are 0 to {vocab_size - 1}"
        raise APIError(400, message, param=param)


def _beyond(tokens: Iterable[int], vocab_size: int) -> int | None:
    return next((token for token in tokens if not 0 <= token < vocab_size), None)


def template_options(
    kwargs: dict[str, Any] | None, effort: str | None, *, thinking: bool | None = None
) -> dict[str, Any]:
    """Gather the options of a chat template; those in `kwargs` win.

    Args:
        kwargs: the body's `chat_template_kwargs`.
        effort: how much the model thinks; `none` switches thinking off.
        thinking: switches thinking on or off, in protocols that have such a field.
    """
    for name in kwargs or {}:
        if name in _RESERVED_OPTIONS or not name.isidentifier():
            message = f"chat_template_kwargs cannot set {quote(name)}; leave it out"
            raise APIError(400, message, param="chat_template_kwargs")
    if len(kwargs or {}) > MAX_OPTIONS:
        message = f"chat_template_kwargs has over {MAX_OPTIONS} options; send fewer"
        raise APIError(400, message, param="chat_template_kwargs")
    options: dict[str, Any] = {}
    if effort is not None:
        options = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if thinking is not None:
        options["enable_thinking"] = thinking
    return {**options, **(kwargs or {})}
