"""OpenAI's request bodies: decoded, checked, and turned into what the service takes."""

import secrets
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

from ..models.params import SamplingParams
from .failures import APIError

MAX_STOP_SEQUENCES = 16
MAX_STOP_LENGTH = 1000
MAX_CHAT_LOGPROBS = 20
MAX_TEXT_LOGPROBS = 5

Number = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Tokens = Annotated[int, Meta(ge=1)]
StopSequence = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]


class StreamOptions(msgspec.Struct):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and text completions share. Unknown fields are ignored, as OpenAI's SDK expects.

    Fields that would change the answer and are not supported stand here too, so that they
    can be refused by name.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: int | None = None
    stop: (
        StopSequence | Annotated[list[StopSequence], Meta(max_length=MAX_STOP_SEQUENCES)] | None
    ) = None
    n: int | None = None

    @property
    def answer_limit(self) -> int | None:
        """The most tokens the answer may have, if the client said."""
        return self.max_tokens

    @property
    def told_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside the chosen one; None: nothing is."""
        return None

    @property
    def stops(self) -> list[str]:
        """The stop sequences."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """Whether a stream shall end with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def refuse_unsupported(self) -> None:
        """Refuse what would change the answer and cannot be done.

        Raises:
            APIError: 400, naming the field.
        """
        if self.n not in (None, 1):
            raise _unsupported("n", "send one request for each answer")
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options needs stream to be true", param="stream_options")

    def sampling(self, vocab_size: int) -> SamplingParams:
        """Turn the fields into sampling parameters; what is absent gets its default.

        Raises:
            APIError: 400 for a top_k or a logit_bias beyond the vocabulary.
        """
        top_k = self.top_k or 0
        if top_k > vocab_size:
            message = f"top_k is {top_k}, but the model has {vocab_size} tokens; send at most that"
            raise APIError(400, message, param="top_k")
        for token in self.logit_bias or {}:
            if not 0 <= token < vocab_size:
                message = (
                    f"logit_bias names token {token}, but the model's tokens are "
                    f"0 to {vocab_size - 1}"
                )
                raise APIError(400, message, param="logit_bias")
        seed = secrets.randbits(64) if self.seed is None else self.seed % 2**64
        return SamplingParams(
            seed=seed,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(top_k, 0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=self.logit_bias or {},
            top_logprobs=self.told_logprobs,
        )


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None

    @property
    def answer_limit(self) -> int | None:
        """The most tokens the answer may have; the newer name wins."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def told_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told; asking for none tells the chosen one."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        """Refuse what would change the answer and cannot be done."""
        super().refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.tools and self.tool_choice != "none":
            raise _unsupported("tools", "leave it out, or set tool_choice to none")
        if self.functions:
            raise _unsupported("functions", "leave it out")
        if self.response_format and self.response_format.get("type") != "text":
            raise _unsupported("response_format", "leave it out, or ask for type text")
        if self.modalities and self.modalities != ["text"]:
            raise _unsupported("modalities", "ask for text only")

    def template_messages(self) -> list[dict[str, Any]]:
        """Write the messages as chat templates expect them: plain text contents.

        Raises:
            APIError: 400 for a part that is not text.
        """
        return [_template_message(i, message) for i, message in enumerate(self.messages)]


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[int | str | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TEXT_LOGPROBS)] | None = None

    @property
    def told_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told; 0 tells the chosen one."""
        return self.logprobs

    def refuse_unsupported(self) -> None:
        """Refuse what would change the answer and cannot be done."""
        super().refuse_unsupported()
        if self.suffix:
            raise _unsupported("suffix", "leave it out")
        if self.echo:
            raise _unsupported("echo", "leave it out")
        if self.best_of not in (None, 1):
            raise _unsupported("best_of", "leave it out")

    def single_prompt(self, vocab_size: int) -> str | list[int]:
        """Return the prompt as text or token ids.

        Raises:
            APIError: 400 for several prompts, or a token that does not exist.
        """
        prompt = self.prompt
        only = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        if isinstance(only, str):
            return only
        items = [only] if isinstance(only, int) else only
        return [_token(item, vocab_size) for item in items]


class Checked(Protocol):
    """A body that knows what it must not hold."""

    def refuse_unsupported(self) -> None:
        """Raise an APIError for what cannot be done."""
        ...


Body = TypeVar("Body", bound=Checked)


def decode(raw: bytes, kind: type[Body]) -> Body:
    """Decode and check a body.

    Raises:
        APIError: 400, naming the field at fault.
    """
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        detail, _, path = str(error).partition(" - at `$")
        param = path.strip("`.") or None
        message = f"{param}: {detail}" if param else detail
        raise APIError(400, message, param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise APIError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    body.refuse_unsupported()
    return body


def _template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(message)
    # Templates know "system"; "developer" is OpenAI's newer name for the same voice.
    fields["role"] = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = "".join(_text_of(index, part) for part in content)
    return {**fields, "content": content or ""}


def _text_of(index: int, part: dict[str, Any]) -> str:
    text = part.get("text")
    if part.get("type") not in ("text", "input_text") or not isinstance(text, str):
        message = f"messages[{index}] has a part of type {part.get('type')!r}; send text only"
        raise APIError(400, message, param=f"messages[{index}].content")
    return text


def _token(item: int | str | list[int], vocab_size: int) -> int:
    if not isinstance(item, int):
        raise APIError(400, "send one request for each prompt", param="prompt")
    if not 0 <= item < vocab_size:
        message = f"token {item} does not exist; there are 0 to {vocab_size - 1}"
        raise APIError(400, message, param="prompt")
    return item


def _unsupported(field: str, advice: str) -> APIError:
    message = f"{field} is not supported; {advice}"
    return APIError(400, message, code="unsupported_parameter", param=field)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
