"""Text to tokens and back: `POST /tokenize`, `POST /detokenize`, in vLLM's shapes."""

from typing import Annotated, Any

from msgspec import Meta, Raw

from ...models.text.conversation import Conversation
from ..http.decoding import ModelBody, decode_part
from ..http.failures import APIError
from ..requests.workers import Check
from .chat import MAX_MESSAGES, ChatRequest
from .generation_request import unsupported
from .tools import ToolList

_NULL = Raw(b"null")


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
        """Whether a text gets the tokens that the model's tokenizer adds."""
        return self.add_special_tokens is not False

    def refuse_unsupported(self) -> None:
        """Refuse what would change the answer and cannot be done."""
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
        """Read the text, or messages and tools.

        Raises:
            APIError: 400, naming what is wrong; 413 for what is too large to decode.
        """
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
        """Read the ids.

        Raises:
            APIError: 400, they are none; 413, they are too large to decode.
        """
        tokens: list[int] = decode_part(self.tokens, list[int], "tokens")
        return tokens
