"""Bodies of text: OpenAI's `POST /v1/completions`, and vLLM's `/tokenize` and `/detokenize`."""

from typing import Annotated, Any, cast

from msgspec import Meta, Raw

from ...models.text.conversation import Conversation
from ..http.bodies import ModelBody, decode_part
from ..http.failures import APIError
from ..requests.workers import Check
from .chat import MAX_MESSAGES, ChatRequest
from .generation_request import MAX_ANSWERS, GenerationRequest, Prompt, Refused, unsupported
from .openai_fields import OpenAIFields, bound_of
from .tools import ToolList

MAX_TEXT_LOGPROBS = 5
_LONGEST_ESCAPE = 12  # bytes of JSON for one character
_NULL = Raw(b"null")


class CompletionRequest(OpenAIFields, kw_only=True):
    """The body. Its prompt is decoded later: it may be tens of megabytes."""

    prompt: Raw
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TEXT_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = None
    suffix: Annotated[str | None, Refused("leave it out", ("",))] = None
    echo: Annotated[bool | None, Refused("leave it out", (False,))] = None

    @property
    def told_logprobs(self) -> int | None:
        """Number of likeliest tokens told beside the chosen one; None tells neither."""
        return self.logprobs

    @property
    def least_characters(self) -> int:
        """Lower bound of a text prompt's characters, known before it is decoded."""
        raw = memoryview(self.prompt)
        return len(raw) // _LONGEST_ESCAPE if bytes(raw[:1]) == b'"' else 0

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the answer and are not served."""
        super().refuse_unsupported()
        if self.response_format and self.response_format.get("type") != "text":
            raise unsupported("response_format", "send structured_outputs, or use chat completions")

    def release(self) -> None:
        """Drop the prompt, which is a view of the body."""
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
        """Tell a prompt of token ids from a list of prompts."""
        prompt = decode_part(self.prompt, str | list[int | str | list[int]], "prompt")
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


class TokenizeRequest(ModelBody, kw_only=True):
    """The body: a text, or a conversation as chat completions have it."""

    prompt: Raw = _NULL
    messages: Annotated[list[Raw], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: ToolList | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    @property
    def special_tokens(self) -> bool:
        """True if a text gets the tokens that the model's tokenizer adds."""
        return self.add_special_tokens is not False

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the answer and are not served."""
        if (self.prompt == _NULL) == (self.messages is None):
            raise APIError(400, "send either prompt or messages", param="prompt")
        if self.return_token_strs:
            raise unsupported("return_token_strs", "send the tokens to /detokenize, one by one")
        if self.messages is None:
            return
        if self.add_special_tokens:
            advice = "leave it out: the chat template writes its own"
            raise unsupported("add_special_tokens with messages", advice)
        if self.add_generation_prompt is False:
            raise unsupported("add_generation_prompt=false", "count what an answer follows")
        if self.continue_final_message:
            raise unsupported("continue_final_message", "leave it out")

    def prompt_to_read(self, check: Check) -> Conversation | str:
        """Read the text, or messages and tools; 413 for a text that is too large to decode."""
        if self.messages is None:
            text: str = decode_part(self.prompt, str, "prompt")
            return text
        chat = ChatRequest(
            messages=self.messages,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        return chat.read_conversation(check)


class DetokenizeRequest(ModelBody, kw_only=True):
    """The body: token ids."""

    tokens: Raw

    def tokens_to_read(self) -> list[int]:
        """Read the ids; 413 for a list that is too large to decode."""
        tokens: list[int] = decode_part(self.tokens, list[int], "tokens")
        return tokens
