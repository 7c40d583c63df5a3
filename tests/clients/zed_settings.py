"""Zed's `settings.json`, as far as a recipe needs it.

Its crate `settings_content` says so: where a field without a default is missing, or has a wrong
type, the whole of `openai_compatible` is dropped, with all its providers. Fields that Zed does not
know, and would ignore, are refused here: they would be mistakes.
"""

from typing import Literal

import msgspec

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Capabilities(msgspec.Struct, forbid_unknown_fields=True):
    """The first four have no defaults where one of them is given."""

    tools: bool
    images: bool
    parallel_tool_calls: bool
    prompt_cache_key: bool
    chat_completions: bool = True
    interleaved_reasoning: bool = False
    max_tokens_parameter: bool = False


class Model(msgspec.Struct, forbid_unknown_fields=True):
    """One of a provider's `available_models`."""

    name: str
    max_tokens: int
    display_name: str | None = None
    max_output_tokens: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: Effort | None = None
    capabilities: Capabilities = msgspec.field(
        default_factory=lambda: Capabilities(
            tools=True, images=False, parallel_tool_calls=False, prompt_cache_key=False
        )
    )


class Provider(msgspec.Struct, forbid_unknown_fields=True):
    """One of `language_models.openai_compatible`."""

    api_url: str
    available_models: list[Model]
    custom_headers: dict[str, str] | None = None


class Providers(msgspec.Struct, forbid_unknown_fields=True):
    """`language_models`."""

    openai_compatible: dict[str, Provider]


class Choice(msgspec.Struct, forbid_unknown_fields=True):
    """`agent.default_model`."""

    provider: str
    model: str


class Agent(msgspec.Struct, forbid_unknown_fields=True):
    """`agent`."""

    default_model: Choice


class Settings(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    language_models: Providers
    agent: Agent
