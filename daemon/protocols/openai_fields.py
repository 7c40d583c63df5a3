"""What OpenAI's chat and text completions share: the fields that choose tokens."""

import secrets
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...models.params import SamplingParams
from ...models.text.conversation import Choice, Constraint, JSONObject, JSONSchema, Regex
from ..http.failures import APIError
from .generation_request import GenerationBody, unsupported

MAX_BIASES = 1024
MAX_STOP_SEQUENCES = 16
MAX_STOP_LENGTH = 1000
MAX_N = 8
MAX_KEY = 256
MAX_CHOICES = 1000

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Tokens = Annotated[int, Meta(ge=1)]
Bound = Annotated[int, Meta(ge=-1)]
"""Of an answer's tokens; -1 is none."""
StopSequence = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
_Text = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[_Text], Meta(min_length=1, max_length=MAX_CHOICES)]

# What other servers know, what would change an answer and is not done here: the value that
# changes nothing, and what to do instead.
_REFUSED: dict[str, tuple[object, str]] = {
    "best_of": (1, "leave it out, or ask for n answers and choose"),
    "use_beam_search": (False, "leave it out"),
    "min_tokens": (0, "leave it out"),
    "ignore_eos": (False, "leave it out"),
    "stop_token_ids": ([], "send the tokens' text as stop"),
    "bad_words": ([], "send a logit_bias of -100 for their tokens"),
    "length_penalty": (1, "leave it out"),
    "typical_p": (1, "leave it out"),
    "guided_grammar": (None, "send a JSON schema, a regex or choices"),
    "chat_template": (None, "send chat_template_kwargs; the template is the model's"),
    "documents": (None, "put them into a message"),
    "continue_final_message": (False, "use text completions"),
    "add_generation_prompt": (True, "use text completions"),
    "add_special_tokens": (None, "send token ids as the prompt"),
    "truncate_prompt_tokens": (None, "send a shorter prompt"),
    "prompt_embeds": (None, "send text or token ids"),
    "prompt_logprobs": (None, "leave it out"),
    "allowed_token_ids": (None, "send structured_outputs, or a logit_bias"),
    "repeat_penalty": (1, "send repetition_penalty"),
    "xtc_probability": (0, "leave it out"),
    "dry_multiplier": (0, "leave it out"),
    "mirostat": (0, "leave it out"),
    "n_predict": (None, "send max_tokens"),
    "grammar": (None, "send a JSON schema, a regex or choices"),
    "json_schema": (None, "send response_format or structured_outputs"),
    "structural_tag": (None, "send tools"),
    "thinking": (None, "send reasoning_effort or chat_template_kwargs"),
    "enable_thinking": (None, "send it in chat_template_kwargs"),
    "thinking_token_budget": (None, "leave it out"),
    "include_stop_str_in_output": (False, "leave it out"),
    "skip_special_tokens": (True, "leave it out"),
}


class StreamOptions(msgspec.Struct):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None


Verbosity = Literal["low", "medium", "high"]
"""What a client asks of every model that it knows; it changes nothing here."""

ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
FormatKind = Literal["text", "json_object", "json_schema"]


class SchemaFormat(msgspec.Struct):
    """What a format says of a schema."""

    schema: dict[str, Any] | bool


def format_constraints(
    kind: FormatKind,
    *,
    schema: dict[str, Any] | bool | None,
    named: SchemaFormat | None,
    field: str,
    place: str,
) -> list[Constraint]:
    """List what a format's text must match; nothing for text.

    A schema beside `json_object`, and one in the other protocol's place, counts: servers differ.

    Args:
        kind: of the format.
        schema: its member `schema`.
        named: its member `json_schema`.
        field: where the format stands in the body.
        place: where a schema belongs in it.

    Raises:
        APIError: 400, there is no schema.
    """
    if kind == "text":
        return []
    schemas = [] if schema is None else [schema]
    schemas += [] if named is None else [named.schema]
    if kind == "json_object":  # whatever the schema leaves open, it is an object
        schemas = [{"type": "object", **s} if isinstance(s, dict) else s for s in schemas]
        schemas = [each for each in schemas if each is not True]
    if schemas:
        return [JSONSchema(each) for each in schemas]
    if kind == "json_object":
        return [JSONObject()]
    message = f"{field} of type json_schema needs {place}"
    raise APIError(400, message, param=f"{field}.{place.split('.', maxsplit=1)[0]}")


def bound_of(**fields: int | None) -> int | None:
    """Choose an answer's bound of tokens: the first field that is set.

    Raises:
        APIError: 400, a field is 0.
    """
    for field, value in fields.items():
        if value == 0:
            raise APIError(400, f"{field}: Expected `int` >= 1, or -1 for no bound", param=field)
    first = next((value for value in fields.values() if value is not None), None)
    return None if first == -1 else first


class StructuredOutputs(msgspec.Struct):
    """An extension that vLLM's clients know: what the answer must match. One of its fields."""

    json: dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Choices | None = None
    grammar: Any = None
    structural_tag: Any = None

    def constraints(self) -> list[Constraint]:
        """List what is asked for.

        Raises:
            APIError: 400 for what is not supported.
        """
        if self.grammar is not None or self.structural_tag is not None:
            raise unsupported("structured_outputs", "of it, send json, regex or choice")
        found: list[Constraint] = []
        if self.json is not None:
            found.append(JSONSchema(self.json))
        if self.json_object:
            found.append(JSONObject())
        if self.regex is not None:
            found.append(Regex(self.regex))
        if self.choice is not None:
            found.append(Choice(self.choice))
        return found


class OpenAIFields(GenerationBody, kw_only=True):
    """The fields of both. Those that would change the answer and are refused stand here too."""

    stream_options: StreamOptions | None = None
    max_tokens: Bound | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[int, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)]
        | None
    ) = None
    seed: int | None = None
    stop: (
        StopSequence | Annotated[list[StopSequence], Meta(max_length=MAX_STOP_SEQUENCES)] | None
    ) = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=MAX_KEY)] | None = None
    service_tier: ServiceTier | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | None = None
    guided_regex: Annotated[str, Meta(min_length=1)] | None = None
    guided_choice: Choices | None = None
    best_of: Any = None
    use_beam_search: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    stop_token_ids: Any = None
    bad_words: Any = None
    length_penalty: Any = None
    typical_p: Any = None
    guided_grammar: Any = None
    chat_template: Any = None
    documents: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    allowed_token_ids: Any = None
    repeat_penalty: Any = None
    xtc_probability: Any = None
    dry_multiplier: Any = None
    mirostat: Any = None
    n_predict: Any = None
    grammar: Any = None
    json_schema: Any = None
    structural_tag: Any = None
    thinking: Any = None
    enable_thinking: Any = None
    thinking_token_budget: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None

    @property
    def stops(self) -> list[str]:
        """The stop sequences."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def session_name(self) -> str | None:
        """The cache key, which agents set to their session's name."""
        key = self.prompt_cache_key
        return key if key and key.isprintable() else None

    @property
    def flex(self) -> bool:
        """Whether OpenAI would serve it slowly: its other tiers are no slower than the default."""
        return self.service_tier == "flex"

    @property
    def wants_usage(self) -> bool:
        """Whether a stream shall end with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def told_logprobs(self) -> int | None:
        """How many of the likeliest tokens are told beside the chosen one; None: nothing is."""
        return None

    def refuse_unsupported(self) -> None:
        """Refuse what would change the answer and cannot be done.

        Raises:
            APIError: 400, naming the field.
        """
        for field, (neutral, advice) in _REFUSED.items():
            if getattr(self, field) not in (None, neutral):
                raise unsupported(field, advice)
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options needs stream to be true", param="stream_options")

    def constraint(self, *others: Constraint) -> Constraint | None:
        """Find what the answer must match.

        Args:
            others: what fields of the endpoint's own ask for.

        Raises:
            APIError: 400, more than one thing is asked for.
        """
        extension = self.structured_outputs or StructuredOutputs()
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice
        )
        found = [*others, *extension.constraints(), *guided.constraints()]
        if len(found) > 1:
            message = "an answer can match one thing; send one of response_format and its kin"
            raise APIError(400, message, param="response_format")
        return found[0] if found else None

    def sampling(self) -> SamplingParams:
        """Turn the fields into sampling parameters; what is absent gets its default."""
        seed = secrets.randbits(64) if self.seed is None else self.seed % 2**64
        return SamplingParams(
            seed=seed,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(self.top_k or 0, 0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=self.logit_bias or {},
            top_logprobs=self.told_logprobs,
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
