"""What a request tells the chat template besides the conversation."""

from typing import Any

from ..http.failures import APIError
from ..quoting import quote

MAX_OPTIONS = 64
# What rendering itself passes; and a template of the client's own would be a program.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "padding",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
_NO_REASONING = "none"


def read_options(
    kwargs: dict[str, Any] | None, effort: str | None, *, thinking: bool | None = None
) -> dict[str, Any]:
    """Gather a template's options; those that the client names itself win.

    Args:
        kwargs: `chat_template_kwargs`.
        effort: how much the model shall think; `none` switches thinking off.
        thinking: whether it shall think, where the protocol says that.

    Raises:
        APIError: 400 for an option that is not the client's to set.
    """
    for name in kwargs or {}:
        if name in _RESERVED or not name.isidentifier():
            message = f"chat_template_kwargs cannot set {quote(name)}; leave it out"
            raise APIError(400, message, param="chat_template_kwargs")
    if len(kwargs or {}) > MAX_OPTIONS:
        message = f"chat_template_kwargs has over {MAX_OPTIONS} options; send fewer"
        raise APIError(400, message, param="chat_template_kwargs")
    options: dict[str, Any] = {}
    if effort is not None:
        options["reasoning_effort"] = effort
        options["enable_thinking"] = effort != _NO_REASONING
    if thinking is not None:
        options["enable_thinking"] = thinking
    return {**options, **(kwargs or {})}
