"""OpenAI's text completions: `POST /v1/completions`."""

from typing import Annotated, Any, cast

from msgspec import Meta, Raw

from ..http.decoding import decode_part
from ..http.failures import APIError
from ..requests.workers import Check
from .generation_request import MAX_ANSWERS, GenerationRequest, Prompt, unsupported
from .openai_fields import OpenAIFields, bound_of

MAX_TEXT_LOGPROBS = 5
_LONGEST_ESCAPE = 12  # bytes of JSON for one character
_Prompt = str | list[int | str | list[int]]


class CompletionRequest(OpenAIFields, kw_only=True):
    """The body. Its prompt is decoded later: it may be tens of megabytes."""

    prompt: Raw
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TEXT_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def told_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told; 0 tells the chosen one."""
        return self.logprobs

    @property
    def least_characters(self) -> int:
        """How many characters a text prompt has at least."""
        raw = memoryview(self.prompt)
        return len(raw) // _LONGEST_ESCAPE if bytes(raw[:1]) == b'"' else 0

    def refuse_unsupported(self) -> None:
        """Refuse what would change the answer and cannot be done."""
        super().refuse_unsupported()
        if self.suffix:
            raise unsupported("suffix", "leave it out")
        if self.echo:
            raise unsupported("echo", "leave it out")
        if self.response_format and self.response_format.get("type") != "text":
            raise unsupported("response_format", "send structured_outputs, or use chat completions")

    def release(self) -> None:
        """Let go of the prompt, which is a view of the body."""
        self.prompt = Raw(b"")

    def generation_request(self, check: Check) -> GenerationRequest:
        """Read the whole body; see `GenerationBody`."""
        prompts = self._prompts()
        check()
        return GenerationRequest(
            prompts=prompts,
            sampling=self.sampling(),
            n=self.n or 1,
            max_tokens=bound_of(max_tokens=self.max_tokens),
            stops=self.stops,
            constraint=self.constraint(),
        )

    def _prompts(self) -> list[Prompt]:
        """Tell a prompt of tokens from a list of prompts.

        Raises:
            APIError: 400 for a mixture, or too many; 413 for what is too large to decode.
        """
        prompt = decode_part(self.prompt, _Prompt, "prompt")
        if isinstance(prompt, str):
            return [prompt]
        if all(isinstance(item, int) for item in prompt):
            return [cast("list[int]", prompt)]
        if len(prompt) > MAX_ANSWERS:
            raise APIError(400, f"there are over {MAX_ANSWERS} prompts; send fewer", param="prompt")
        if any(isinstance(item, int) for item in prompt):
            message = "prompt mixes token ids with prompts; send ids in a list of their own"
            raise APIError(400, message, param="prompt")
        return cast("list[Prompt]", prompt)


def check_tokens(prompt: list[int], vocab_size: int, param: str = "prompt") -> None:
    """Refuse token ids that do not exist.

    Raises:
        APIError: 400, naming the first.
    """
    for token in prompt:
        if not 0 <= token < vocab_size:
            message = f"token {token} does not exist; there are 0 to {vocab_size - 1}"
            raise APIError(400, message, param=param)
