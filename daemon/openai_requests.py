"""OpenAI's request bodies: decoded, checked, and turned into what the service takes."""

import secrets
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta, Raw

from ..models.params import SamplingParams
from .decoding import CheckedBody, decode_part
from .failures import APIError
from .quoting import quote
from .workers import Check

MAX_MESSAGES = 10_000
MAX_PARTS = 1000
MAX_TOOLS = 1024
MAX_BIASES = 1024
MAX_STOP_SEQUENCES = 16
MAX_STOP_LENGTH = 1000
_LONGEST_ESCAPE = 12  # bytes of JSON for one character
MAX_CHAT_LOGPROBS = 20
MAX_TEXT_LOGPROBS = 5

Number = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Tokens = Annotated[int, Meta(ge=1)]
StopSequence = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
_Prompt = str | list[int | str | list[int]]


class StreamOptions(msgspec.Struct):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None


class GenerationFields(CheckedBody, kw_only=True):
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
    logit_bias: (
        Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)]
        | None
    ) = None
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

    def release(self) -> None:
        """Let go of the body's bytes, once its prompt is tokens."""

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
    content: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """The body of `POST /v1/chat/completions`. Each message is decoded on its own."""

    messages: Annotated[list[Raw], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
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

    def release(self) -> None:
        """Let go of the messages, which are views of the body."""
        self.messages = []

    def template_messages(self, check: Check) -> list[dict[str, Any]]:
        """Write the messages as chat templates expect them: plain text contents.

        Args:
            check: called before each message; ends the work with what it raises.

        Raises:
            APIError: 400 for a message that is none, and for a part that is not text.
        """
        messages = []
        for index, raw in enumerate(self.messages):
            check()
            messages.append(_template_message(index, raw))
        return messages


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Raw
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

    def release(self) -> None:
        """Let go of the prompt, which is a view of the body."""
        self.prompt = Raw(b"")

    @property
    def least_characters(self) -> int:
        """How many characters a text prompt has at least, known before it is decoded."""
        raw = memoryview(self.prompt)
        return len(raw) // _LONGEST_ESCAPE if bytes(raw[:1]) == b'"' else 0

    def single_prompt(self) -> str | list[int]:
        """Return the prompt as text or as what should be token ids.

        Raises:
            APIError: 400 for several prompts; 413 for one that is too large to decode.
        """
        prompt = decode_part(self.prompt, _Prompt, "prompt")
        only = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        if isinstance(only, str):
            return only
        items = [only] if isinstance(only, int) else only
        if not all(isinstance(item, int) for item in items):
            raise APIError(400, "send one request for each prompt", param="prompt")
        return cast("list[int]", items)


def check_tokens(prompt: list[int], vocab_size: int) -> None:
    """Refuse token ids that do not exist.

    Raises:
        APIError: 400, naming the first.
    """
    for token in prompt:
        if not 0 <= token < vocab_size:
            message = f"token {token} does not exist; there are 0 to {vocab_size - 1}"
            raise APIError(400, message, param="prompt")


def _template_message(index: int, raw: Raw) -> dict[str, Any]:
    place = f"messages[{index}]"
    message = decode_part(raw, ChatMessage, place)
    fields: dict[str, Any] = msgspec.to_builtins(message)
    # Templates know "system"; "developer" is OpenAI's newer name for the same voice.
    fields["role"] = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        content = "".join(_text_of(place, part) for part in content)
    return {**fields, "content": content or ""}


def _text_of(place: str, part: dict[str, Any]) -> str:
    text = part.get("text")
    if part.get("type") not in ("text", "input_text") or not isinstance(text, str):
        message = f"{place} has a part of type {quote(part.get('type'))}; send text only"
        raise APIError(400, message, param=f"{place}.content")
    return text


def _unsupported(field: str, advice: str) -> APIError:
    message = f"{field} is not supported; {advice}"
    return APIError(400, message, code="unsupported_parameter", param=field)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
