"""Fields that OpenAI's protocols share: sampling, structure, and those that are refused."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...models.text.conversation import Choice, Constraint, JSONObject, JSONSchema, Regex
from ..http.failures import APIError
from .generation_request import (
    MAX_KEY,
    GenerationBody,
    Probability,
    Refused,
    StopSequence,
    StopSequences,
    unsupported,
)

MAX_BIASES = 1024
MAX_N = 8
MAX_CHOICES = 1000

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bound = Annotated[int, Meta(ge=-1)]
"""Most tokens of an answer; -1 is no bound."""
Text = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[Text], Meta(min_length=1, max_length=MAX_CHOICES)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Schema = dict[str, Any] | bool
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
Verbosity = Literal["low", "medium", "high"]
"""Clients send it to every model that they know; it changes nothing here."""
ConversationName = Annotated[str, Meta(max_length=256)]


class ConversationId(msgspec.Struct):
    """A conversation named by an object."""

    id: ConversationName


def name_of(conversation: ConversationName | ConversationId | None) -> str | None:
    """Return the name in a body's `conversation`."""
    return conversation.id if isinstance(conversation, ConversationId) else conversation


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = None


class SchemaFormat(msgspec.Struct):
    """The member `json_schema` of a format."""

    schema: Schema


class ResponseFormat(msgspec.Struct, omit_defaults=True):
    """The format of an answer's text.

    A schema beside `json_object`, and one in another protocol's place, counts: servers differ.
    """

    type: Literal["text", "json_object", "json_schema"]
    schema: Schema | None = None
    json_schema: SchemaFormat | None = None


def format_constraints(sent: ResponseFormat | None, field: str, place: str) -> list[Constraint]:
    """List the constraints of a format; none for text.

    Args:
        sent: the format.
        field: where it stands in the body.
        place: where its schema belongs in it.
    """
    if sent is None or sent.type == "text":
        return []
    schemas = [] if sent.schema is None else [sent.schema]
    schemas += [] if sent.json_schema is None else [sent.json_schema.schema]
    if sent.type == "json_object":  # a schema may leave the type open
        schemas = [{"type": "object", **s} if isinstance(s, dict) else s for s in schemas]
        schemas = [each for each in schemas if each is not True]
    if schemas:
        return [JSONSchema(each) for each in schemas]
    if sent.type == "json_object":
        return [JSONObject()]
    message = f"{field} of type json_schema needs {place}"
    raise APIError(400, message, param=f"{field}.{place.partition('.')[0]}")


def bound_of(**fields: int | None) -> int | None:
    """Return an answer's bound of tokens: that of the first field that is set; None for none."""
    for field, value in fields.items():
        if value == 0:
            raise APIError(400, f"{field}: Expected `int` >= 1, or -1 for no bound", param=field)
    first = next((value for value in fields.values() if value is not None), None)
    return None if first == -1 else first


class StructuredOutputs(msgspec.Struct):
    """vLLM's extension: a constraint of the answer, in one of the fields."""

    json: Schema | None = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Any = None
    structural_tag: Any = None

    def constraints(self) -> list[Constraint]:
        """List the constraints that are asked for."""
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


_GRAMMAR = Refused("send a JSON schema, a regex or choices")
_OFF = Refused("leave it out", (False,))
_NONE = Refused("leave it out", (0,))
_CONTINUES = "use text completions"


class OpenAIFields(GenerationBody, kw_only=True):
    """The fields of all three protocols, and those of other servers that are refused."""

    stream_options: StreamOptions | None = None
    max_tokens: Bound | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, Bias], Meta(max_length=MAX_BIASES)] | None = None
    seed: int | None = None
    stop: StopSequence | StopSequences | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=MAX_KEY)] | None = None
    service_tier: ServiceTier | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None

    best_of: Annotated[Any, Refused("leave it out, or ask for n answers and choose", (1,))] = None
    use_beam_search: Annotated[Any, _OFF] = None
    min_tokens: Annotated[Any, _NONE] = None
    ignore_eos: Annotated[Any, _OFF] = None
    stop_token_ids: Annotated[Any, Refused("send the tokens' text as stop", ([],))] = None
    bad_words: Annotated[Any, Refused("send a logit_bias of -100 for their tokens", ([],))] = None
    length_penalty: Annotated[Any, Refused("leave it out", (1,))] = None
    typical_p: Annotated[Any, Refused("leave it out", (1,))] = None
    guided_grammar: Annotated[Any, _GRAMMAR] = None
    chat_template: Annotated[
        Any, Refused("send chat_template_kwargs; the template is the model's")
    ] = None
    documents: Annotated[Any, Refused("put them into a message")] = None
    continue_final_message: Annotated[Any, Refused(_CONTINUES, (False,))] = None
    add_generation_prompt: Annotated[Any, Refused(_CONTINUES, (True,))] = None
    add_special_tokens: Annotated[Any, Refused("send token ids as the prompt")] = None
    truncate_prompt_tokens: Annotated[Any, Refused("send a shorter prompt")] = None
    prompt_embeds: Annotated[Any, Refused("send text or token ids")] = None
    prompt_logprobs: Annotated[Any, Refused("leave it out")] = None
    allowed_token_ids: Annotated[Any, Refused("send structured_outputs, or a logit_bias")] = None
    repeat_penalty: Annotated[Any, Refused("send repetition_penalty", (1,))] = None
    xtc_probability: Annotated[Any, _NONE] = None
    dry_multiplier: Annotated[Any, _NONE] = None
    mirostat: Annotated[Any, _NONE] = None
    n_predict: Annotated[Any, Refused("send max_tokens")] = None
    grammar: Annotated[Any, _GRAMMAR] = None
    json_schema: Annotated[Any, Refused("send response_format or structured_outputs")] = None
    structural_tag: Annotated[Any, Refused("send tools")] = None
    thinking: Annotated[Any, Refused("send reasoning_effort or chat_template_kwargs")] = None
    enable_thinking: Annotated[Any, Refused("send it in chat_template_kwargs")] = None
    thinking_token_budget: Annotated[Any, Refused("leave it out")] = None
    include_stop_str_in_output: Annotated[Any, _OFF] = None
    skip_special_tokens: Annotated[Any, Refused("leave it out", (True,))] = None

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
        """True for OpenAI's slow tier; its other tiers are no slower than the default."""
        return self.service_tier == "flex"

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the answer and are not served."""
        super().refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise APIError(400, "stream_options needs stream to be true", param="stream_options")

    def constraint(self, *others: Constraint) -> Constraint | None:
        """Find the answer's one constraint; `others` are those of the endpoint's own fields."""
        extension = self.structured_outputs or StructuredOutputs()
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice
        )
        found = [*others, *extension.constraints(), *guided.constraints()]
        if len(found) > 1:
            message = "an answer can match one thing; send one of response_format and its kin"
            raise APIError(400, message, param="response_format")
        return found[0] if found else None
