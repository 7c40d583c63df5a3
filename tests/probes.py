"""One probe for each feature, in the shape of each protocol that has it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from .answers import Answer

Fields = dict[str, Any]
Shows = Callable[[Answer], bool]

HI = [{"role": "user", "content": "hi"}]
MARKED = {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}

# The protocols, by the names of their columns.
CHAT, TEXT, RESPONSES, MESSAGES = "chat", "completions", "responses", "messages"
DIALECTS = (CHAT, TEXT, RESPONSES, MESSAGES)
ROUTES = {
    CHAT: "/v1/chat/completions",
    TEXT: "/v1/completions",
    RESPONSES: "/v1/responses",
    MESSAGES: "/v1/messages",
}
# Fields that every probe changes.
PLAIN: dict[str, Fields] = {
    CHAT: {"messages": HI, "max_tokens": 4, "temperature": 0},
    TEXT: {"prompt": "hi", "max_tokens": 4, "temperature": 0},
    RESPONSES: {"input": "hi", "max_output_tokens": 16, "temperature": 0},
    MESSAGES: {"messages": HI, "max_tokens": 4, "temperature": 0, "model": "tiny"},
}


class Probe(NamedTuple):
    """A feature, and how each protocol asks for it.

    Attributes:
        feature: its row.
        asked: what is changed in a request of a protocol; a protocol that is not there has no
            such feature.
        shows: whether an answer shows that the feature was honoured; where it need not, a 200
            is all there is to see.
    """

    feature: str
    asked: dict[str, Fields]
    shows: Shows | None = None


def _function(name: str = "add", **more: Any) -> Fields:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    return {"name": name, "description": "adds", "parameters": schema, **more}


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
CHAT_TOOL = {"type": "function", "function": _function()}
FLAT_TOOL = {"type": "function", **_function()}
INPUT_TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
CLOSED = {**SCHEMA, "additionalProperties": False}
LONG = {"max_tokens": 200}
PICTURE = "data:image/png;base64,iVBORw0KGgo="


def _each(*dialects: str, **fields: Any) -> dict[str, Fields]:
    return dict.fromkeys(dialects, fields)


def _openai(**fields: Any) -> dict[str, Fields]:
    return _each(CHAT, TEXT, RESPONSES, **fields)


def _tools(**more: Any) -> dict[str, Fields]:
    return {
        CHAT: {"tools": [CHAT_TOOL], **more},
        RESPONSES: {"tools": [FLAT_TOOL], **more},
        MESSAGES: {"tools": [INPUT_TOOL], **more},
    }


def _is_one_of(*texts: str) -> Shows:
    return lambda answer: answer.text in texts


def _is_json(answer: Answer) -> bool:
    try:
        return isinstance(msgspec.json.decode(answer.text), dict)
    except msgspec.DecodeError:
        return False


def _calls_add(answer: Answer) -> bool:
    return answer.calls[:1] == ["add"]


def _streams(answer: Answer) -> bool:
    return answer.streamed and b'"error":{' not in answer.raw


PROBES = (
    Probe("a text", _each(*DIALECTS), lambda a: bool(a.text)),
    Probe("streaming", _each(*DIALECTS, stream=True), _streams),
    Probe(
        "usage in a stream",
        {
            **_openai(stream=True, stream_options={"include_usage": True}),
            **_each(RESPONSES, MESSAGES, stream=True),
        },
        lambda a: a.streamed and b'"usage":{"' in a.raw,
    ),
    Probe(
        "system prompt",
        {
            CHAT: {"messages": [{"role": "system", "content": "be brief"}, *HI]},
            RESPONSES: {"instructions": "be brief"},
            MESSAGES: {"system": "be brief"},
        },
        lambda a: a.longer_prompt,
    ),
    Probe(
        "developer messages",
        {
            CHAT: {"messages": [{"role": "developer", "content": "be brief"}, *HI]},
            RESPONSES: {"input": [{"role": "developer", "content": "be brief"}, *HI]},
        },
        lambda a: a.longer_prompt,
    ),
    Probe(
        "text in parts",
        {
            CHAT: {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
            RESPONSES: {
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
            },
            MESSAGES: {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        },
        lambda a: a.plain is not None and a.prompt_tokens == a.plain.prompt_tokens,
    ),
    Probe(
        "images",
        {
            CHAT: {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": PICTURE}}],
                    }
                ]
            },
            RESPONSES: {
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}
                ]
            },
            MESSAGES: {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image",
                                "source": {
                                    "type": "base64",
                                    "media_type": "image/png",
                                    "data": "iVBORw0KGgo=",
                                },
                            }
                        ],
                    }
                ]
            },
        },
    ),
    Probe("token ids as prompt", {TEXT: {"prompt": [40, 41]}}, lambda a: a.prompt_tokens == 2),
    Probe(
        "several prompts",
        {TEXT: {"prompt": ["hi", "ho"]}},
        lambda a: len(a.body["choices"]) == 2,
    ),
    Probe("several answers (n)", _openai(n=2), lambda a: len(a.body["choices"]) == 2),
    Probe("echo", {TEXT: {"echo": True}}),
    Probe("suffix", {TEXT: {"suffix": "end"}}),
    Probe("best_of", {TEXT: {"best_of": 2}}),
    Probe(
        "temperature, top_p",
        _each(*DIALECTS, temperature=0.5, top_p=0.9),
    ),
    Probe("top_k", {**_openai(top_k=5), MESSAGES: {"top_k": 5}}),
    Probe("min_p, repetition_penalty", _openai(min_p=0.1, repetition_penalty=1.1)),
    Probe("presence_penalty, frequency_penalty", _openai(presence_penalty=1, frequency_penalty=1)),
    Probe("logit_bias", _openai(logit_bias={"40": 100}), lambda a: len(set(a.text)) == 1),
    Probe("seed", _openai(seed=7, temperature=1)),
    Probe(
        "stop sequences",
        {
            **_openai(stop=["a"]),
            MESSAGES: {"stop_sequences": ["a"]},
        },
    ),
    Probe(
        "log-probabilities",
        {
            CHAT: {"logprobs": True, "top_logprobs": 2},
            TEXT: {"logprobs": 2},
            RESPONSES: {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        },
        lambda a: b'"logprob":' in a.raw or b'"token_logprobs":[' in a.raw,
    ),
    Probe("tools", _tools(), lambda a: a.longer_prompt),
    Probe(
        "a call is required",
        {
            CHAT: {"tools": [CHAT_TOOL], "tool_choice": "required", **LONG},
            RESPONSES: {
                "tools": [FLAT_TOOL],
                "tool_choice": "required",
                "max_output_tokens": 200,
            },
            MESSAGES: {"tools": [INPUT_TOOL], "tool_choice": {"type": "any"}, **LONG},
        },
        _calls_add,
    ),
    Probe(
        "a named tool is required",
        {
            CHAT: {
                "tools": [CHAT_TOOL],
                "tool_choice": {"type": "function", "function": {"name": "add"}},
                **LONG,
            },
            RESPONSES: {
                "tools": [FLAT_TOOL],
                "tool_choice": {"type": "function", "name": "add"},
                "max_output_tokens": 200,
            },
            MESSAGES: {
                "tools": [INPUT_TOOL],
                "tool_choice": {"type": "tool", "name": "add"},
                **LONG,
            },
        },
        _calls_add,
    ),
    Probe(
        "no call is allowed",
        {
            CHAT: {"tools": [CHAT_TOOL], "tool_choice": "none"},
            RESPONSES: {"tools": [FLAT_TOOL], "tool_choice": "none"},
            MESSAGES: {"tools": [INPUT_TOOL], "tool_choice": {"type": "none"}},
        },
        lambda a: not a.calls,
    ),
    Probe(
        "results of calls",
        {
            CHAT: {
                "messages": [
                    *HI,
                    {"role": "assistant", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": "4"},
                ]
            },
            RESPONSES: {
                "input": [
                    *HI,
                    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c1", "output": "4"},
                ]
            },
            MESSAGES: {
                "messages": [
                    *HI,
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {}}],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "4"}],
                    },
                ]
            },
        },
        lambda a: a.longer_prompt,
    ),
    Probe(
        "a result without its call",
        {
            CHAT: {"messages": [{"role": "tool", "tool_call_id": "c1", "content": "4"}]},
            RESPONSES: {
                "input": [{"type": "function_call_output", "call_id": "c1", "output": "4"}]
            },
            MESSAGES: {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "4"}],
                    }
                ]
            },
        },
    ),
    Probe(
        "tools that the server runs",
        {
            CHAT: {"tools": [{"type": "web_search"}]},
            RESPONSES: {"tools": [{"type": "web_search"}]},
            MESSAGES: {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        },
        lambda a: a.longer_prompt,
    ),
    Probe("functions, function_call", {CHAT: {"functions": [{"name": "add"}]}}),
    Probe(
        "a JSON object",
        {
            CHAT: {"response_format": {"type": "json_object"}, "max_tokens": 2000},
            RESPONSES: {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 2000},
        },
        _is_json,
    ),
    Probe(
        "a JSON schema",
        {
            CHAT: {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": CLOSED},
                },
                **LONG,
            },
            TEXT: {"structured_outputs": {"json": CLOSED}, **LONG},
            RESPONSES: {
                "text": {"format": {"type": "json_schema", "name": "a", "schema": CLOSED}},
                "max_output_tokens": 200,
            },
            MESSAGES: {
                "output_config": {"format": {"type": "json_schema", "schema": CLOSED}},
                **LONG,
            },
        },
        _is_json,
    ),
    Probe("a regex", _openai(guided_regex="[ab]"), _is_one_of("a", "b")),
    Probe("a choice", _openai(guided_choice=["yes", "no"]), _is_one_of("yes", "no")),
    Probe("a grammar", _openai(guided_grammar="root ::= x")),
    Probe(
        "how much to think",
        {
            CHAT: {"reasoning_effort": "low"},
            RESPONSES: {"reasoning": {"effort": "low"}},
            MESSAGES: {"thinking": {"type": "disabled"}},
        },
    ),
    Probe(
        "chat_template_kwargs",
        _each(CHAT, RESPONSES, chat_template_kwargs={"enable_thinking": False}),
    ),
    Probe("conversation in the body", _each(CHAT, RESPONSES, conversation="c")),
    Probe(
        "prompt_cache_key",
        _openai(prompt_cache_key="session"),
    ),
    Probe(
        "cache_control",
        {
            CHAT: {"messages": [{"role": "user", "content": [MARKED]}]},
            MESSAGES: {"system": [MARKED]},
        },
    ),
    Probe(
        "a previous response that is not there",
        {RESPONSES: {"previous_response_id": "resp_nobody"}},
    ),
    Probe("audio", {CHAT: {"modalities": ["text", "audio"]}}),
    Probe("web_search_options", {CHAT: {"web_search_options": {}}}),
    Probe("verbosity", {CHAT: {"verbosity": "low"}, RESPONSES: {"text": {"verbosity": "low"}}}),
    Probe("use_beam_search", _openai(use_beam_search=True)),
    Probe("min_tokens", _openai(min_tokens=2)),
    Probe("ignore_eos", _openai(ignore_eos=True)),
    Probe("stop_token_ids", _openai(stop_token_ids=[40])),
    Probe("bad_words", _openai(bad_words=["no"])),
    Probe(
        "user, metadata, store, service_tier",
        {
            **_openai(user="u", metadata={"a": "b"}, store=False, service_tier="auto"),
            RESPONSES: {
                "user": "u",
                "metadata": {"a": "b"},
                "store": False,
                "service_tier": "auto",
            },
            MESSAGES: {"metadata": {"user_id": "u"}, "service_tier": "auto"},
        },
    ),
    Probe("an unknown model", _each(*DIALECTS, model="gpt-99")),
    Probe(
        "a prompt beyond the context",
        {
            **_each(CHAT, MESSAGES, messages=[{"role": "user", "content": "x" * 9000}]),
            TEXT: {"prompt": [40] * 9000},
            RESPONSES: {"input": "x" * 9000},
        },
    ),
)
