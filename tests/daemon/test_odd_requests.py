"""Odd requests of agents and clients that are served, in all protocols.

They stand in the history, or come with every request: refused, they would end the conversation.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from umbel.daemon.http.bodies import decode
from umbel.daemon.http.failures import APIError
from umbel.daemon.protocols.chat import ChatRequest
from umbel.daemon.protocols.completions import CompletionRequest
from umbel.daemon.protocols.generation_request import GenerationBody, GenerationRequest
from umbel.daemon.protocols.messages import MessagesRequest
from umbel.daemon.protocols.responses import ResponsesRequest
from umbel.daemon.requests.prompts import Author, PromptReader
from umbel.models.text.conversation import Conversation, JSONObject, JSONSchema
from umbel.scheduler.limits import Admission

from ..models.text.templates import model_with
from .running import RunningDaemon

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel

SAID = [{"role": "user", "content": "hello"}]
HOSTED = {"type": "web_search_20250305", "name": "web_search"}
SCHEMA = {"type": "object", "required": ["a"]}

Body = tuple[type[GenerationBody], dict[str, Any]]
OPENAI: list[Body] = [
    (ChatRequest, {"messages": SAID}),
    (CompletionRequest, {"prompt": "hello"}),
    (ResponsesRequest, {"input": "hello"}),
]


def read(kind: type[GenerationBody], **fields: Any) -> GenerationRequest:
    """Read a body to the request that it becomes."""
    return decode(json.dumps(fields).encode(), kind).generation_request(lambda: None)


def conversation(kind: type[GenerationBody], **fields: Any) -> Conversation:
    (prompt,) = read(kind, **fields).prompts
    assert isinstance(prompt, Conversation)
    return prompt


def reader_of(loaded: "LoadedModel") -> PromptReader:
    return PromptReader(loaded, Admission(8192))


@pytest.fixture(scope="module")
def reader(tiny: "LoadedModel") -> PromptReader:
    return reader_of(tiny)


def prompt_of(reader: PromptReader, body: Body, sent: bytes | None = None) -> list[int]:
    """Read a body to the tokens of its prompt, as a request's worker does."""
    kind, fields = body
    decoded = decode(sent or json.dumps(fields).encode(), kind)
    (rendered,) = reader.prepare(decoded, Author("t", "req-1"), lambda: None).prompts
    return rendered.prompt


# -- values that clients send in the belief that every server knows them ------------------------


@pytest.mark.parametrize(("kind", "said"), OPENAI)
def test_tokens_without_a_bound(kind: type[GenerationBody], said: dict[str, Any]) -> None:
    """-1 is no bound."""
    assert read(kind, **said, max_tokens=-1).max_tokens is None
    assert read(kind, **said, max_tokens=7).max_tokens == 7
    with pytest.raises(APIError, match=r"^max_tokens: Expected `int` >= 1, or -1"):
        read(kind, **said, max_tokens=0)


@pytest.mark.parametrize(
    ("kind", "said", "newer"),
    [
        (ChatRequest, {"messages": SAID}, "max_completion_tokens"),
        (ResponsesRequest, {"input": "hello"}, "max_output_tokens"),
    ],
)
@pytest.mark.parametrize(("sent", "bound"), [(-1, None), (9, 9), (None, 7)])
def test_newer_name_of_a_bound_is_stronger(
    kind: type[GenerationBody], said: dict[str, Any], newer: str, sent: int | None, bound: int
) -> None:
    assert read(kind, **said, max_tokens=7, **{newer: sent}).max_tokens == bound


@pytest.mark.parametrize(
    ("sent", "held"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, JSONObject()),
        ({"type": "json_object", "schema": SCHEMA}, JSONSchema(SCHEMA)),
        ({"type": "json_object", "json_schema": {"schema": SCHEMA}}, JSONSchema(SCHEMA)),
        ({"type": "json_object", "schema": {}}, JSONSchema({"type": "object"})),
        ({"type": "json_object", "schema": True}, JSONObject()),
        (
            {"type": "json_schema", "schema": SCHEMA, "name": "n", "strict": True},
            JSONSchema(SCHEMA),
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            JSONSchema(SCHEMA),
        ),
    ],
)
def test_schema_wherever_it_stands(sent: dict[str, Any], held: object) -> None:
    assert read(ChatRequest, messages=SAID, response_format=sent).constraint == held
    assert read(ResponsesRequest, input="hi", text={"format": sent}).constraint == held


def test_two_schemas_are_refused() -> None:
    both = {"type": "json_object", "schema": {}, "json_schema": {"schema": SCHEMA}}
    with pytest.raises(APIError, match="an answer can match one thing"):
        read(ChatRequest, messages=SAID, response_format=both)


@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
def test_verbosity(verbosity: str) -> None:
    """Codex asks for it under the names of models that it knows."""
    read(ChatRequest, messages=SAID, verbosity=verbosity)
    read(ResponsesRequest, input="hi", text={"verbosity": verbosity})


def test_thinking_without_a_budget() -> None:
    enabled = {"type": "enabled"}
    found = conversation(MessagesRequest, messages=SAID, max_tokens=7, thinking=enabled)
    assert found.options == {"enable_thinking": True}


def test_calls_that_ran_at_anthropic() -> None:
    """They are left out, as their tools are."""
    called = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    answer = {"role": "assistant", "content": [called, found, {"type": "text", "text": "a"}]}
    read_ = conversation(MessagesRequest, messages=[*SAID, answer, *SAID], max_tokens=7)
    assert [message.content for message in read_.messages] == ["hello", "a", "hello"]


# -- schemas of tools ---------------------------------------------------------------------------


def chat(schema: Any, choice: str, **about: Any) -> Body:
    """Offer a tool in a chat completion, as the second one."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters, **about}}
        for name, parameters in (("other", {"type": "object"}), ("look", schema))
    ]
    return ChatRequest, {"messages": SAID, "tools": tools, "tool_choice": choice}


def messages(schema: Any, choice: str, **about: Any) -> Body:
    """Offer it in a message, behind a tool that the server would run."""
    tools = [HOSTED, {"name": "look", "input_schema": schema, **about}]
    kind = {"type": "any" if choice == "required" else choice}
    body = {"messages": SAID, "max_tokens": 4, "tools": tools, "tool_choice": kind}
    return MessagesRequest, body


def responses(schema: Any, choice: str, **about: Any) -> Body:
    """Offer it in a response, inside a namespace and behind a hosted tool."""
    inner = [
        {"type": "function", "name": name, "parameters": parameters, **about}
        for name, parameters in (("other", {"type": "object"}), ("look", schema))
    ]
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "eyes", "tools": inner}]
    return ResponsesRequest, {"input": "hello", "tools": tools, "tool_choice": choice}


Offer = Callable[..., Body]
PLACES: dict[Offer, str] = {
    chat: "tools.1.function.parameters",
    messages: "tools.1.input_schema",
    responses: "tools.1.tools.1.parameters",
}
SLIPS: list[dict[str, Any]] = [
    {"$schema": "http://json-schema.org/draft-07/schema#"},
    {"title": "NoArguments"},
    {"properties": None},
    {"type": "object", "properties": []},
    {"type": "object", "properties": None, "required": None, "additionalProperties": None},
    {"type": "object", "properties": {"a": {"type": "string", "required": True}}},
    {"type": "object", "properties": {"a": {"type": None, "description": None, "enum": None}}},
    {"type": "object", "properties": {"a": {"items": [], "examples": "x", "deprecated": "v2"}}},
    {"type": "object", "properties": {"a": {"format": "colour", "title": 1, "$comment": {}}}},
    {"type": "object", "properties": {"a": {"not": {}}}},
]
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "properties": {"a": {"type": "any"}}}, ".properties.a.type: must be one"),
    ({"type": "object", "properties": {"a": {"minimum": "0"}}}, ".properties.a.minimum: must be"),
    ({"type": "object", "required": "a"}, ".required: must be a list of names"),
]


def refusal(reader: PromptReader, body: Body) -> APIError:
    with pytest.raises(APIError) as refused:
        prompt_of(reader, body)
    assert refused.value.status == 400
    return refused.value


@pytest.mark.parametrize("offer", PLACES)
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_slips_in_schemas(reader: PromptReader, offer: Offer, choice: str) -> None:
    """They say nothing, even if arguments are held to the schema."""
    for schema in SLIPS:
        prompt_of(reader, offer(schema, choice))


@pytest.mark.parametrize("offer", PLACES)
def test_faults_in_schemas(reader: PromptReader, offer: Offer) -> None:
    """They are refused where they are enforced, under the name that the client knows."""
    for schema, words in FAULTS:
        for choice in ("auto", "none"):
            prompt_of(reader, offer(schema, choice))
        for enforced in (offer(schema, "required"), offer(schema, "auto", strict=True)):
            assert refusal(reader, enforced).message.startswith(f"{PLACES[offer]}{words}")


@pytest.mark.parametrize("offer", PLACES)
def test_deep_schemas_are_refused_even_where_nothing_is_enforced(
    reader: PromptReader, offer: Offer
) -> None:
    deep: dict[str, Any] = {}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    words = f"{PLACES[offer]}: is nested deeper than 96 levels"
    assert refusal(reader, offer(deep, "none")).message == words


@pytest.mark.parametrize("offer", PLACES)
def test_bad_names_of_tools_have_their_place(reader: PromptReader, offer: Offer) -> None:
    place = {chat: "tools[0]", messages: "tools[1]", responses: "tools[1].tools[0]"}[offer]
    refused = refusal(reader, offer({"type": "object"}, "auto", name="two words"))
    assert refused.message.startswith(f"{place} is named ")


# -- calls and results of the history -----------------------------------------------------------

CALLS = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for tool_call in (m.tool_calls or []) | map(attribute="function") %}<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ dict(tool_call.arguments.items()) | tojson }}}
</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
"""As Qwen2.5's, where arguments must be an object."""
LOOK = {
    "type": "object",
    "properties": {"where": {"type": "string", "minLength": 400}},
    "required": ["where"],
}


def chat_history(arguments: Any, result: Any, said: Any = "hello") -> Body:
    """Send a call and its result in a chat completion."""
    called = {"id": "c1", "type": "", "function": {"name": "look", "arguments": arguments}}
    talk = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]
    return ChatRequest, {"messages": talk, "max_tokens": 2, "tools": tools}


def messages_history(arguments: Any, result: Any, said: Any = "hello") -> Body:
    """Send them in a message."""
    called = {"type": "tool_use", "id": "c1", "name": "look", "input": arguments}
    thought = {"type": "thinking", "thinking": None, "signature": None}
    outcome = {"type": "tool_result", "tool_use_id": "c1", "content": result}
    talk = [
        {"role": "user", "content": said},
        {"role": "assistant", "content": [thought, {"type": "text", "text": None}, called]},
        {"role": "user", "content": [outcome]},
    ]
    tools = [{"name": "look", "input_schema": LOOK}]
    return MessagesRequest, {"messages": talk, "max_tokens": 2, "tools": tools}


def responses_history(arguments: Any, result: Any, said: Any = "hello") -> Body:
    """Send them in a response."""
    items = [
        {"role": "user", "content": said},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": result},
    ]
    tools = [{"type": "function", "name": "look", "parameters": LOOK}]
    return ResponsesRequest, {"input": items, "max_output_tokens": 2, "tools": tools}


History = Callable[..., Body]
HISTORIES = [chat_history, messages_history, responses_history]


@pytest.fixture(scope="module")
def objects_reader(tmp_path_factory: pytest.TempPathFactory) -> PromptReader:
    """Reads prompts for a template that takes a call's arguments as an object."""
    return reader_of(model_with(tmp_path_factory.mktemp("models"), CALLS))


@pytest.mark.parametrize("history", HISTORIES)
def test_calls_with_odd_arguments(objects_reader: PromptReader, history: History) -> None:
    """A call that a length cut, and those of other servers and agents."""
    texts = ['{"where": "he', "[1]", '"x"', "null", "5", "", "no JSON"]
    values: list[Any] = [None, {}, [1], 5]
    for arguments in [*texts, *values]:
        prompt_of(objects_reader, history(arguments, "Nothing."))


def test_cut_call_comes_back(tiny_daemon: RunningDaemon) -> None:
    """It is sent with its arguments as far as they came, and served in the next request."""
    _, body = chat_history("{}", "Nothing.")
    asked = {**body, "messages": body["messages"][:1], "max_tokens": 250, "temperature": 0}
    forced = {"type": "function", "function": {"name": "look"}}
    (choice,) = tiny_daemon.post({**asked, "tool_choice": forced}).json()["choices"]
    assert choice["finish_reason"] == "length"
    (called,) = choice["message"]["tool_calls"]
    assert '"where"' in called["function"]["arguments"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(called["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": called["id"], "content": "The call was cut."}
    talk = [*asked["messages"], choice["message"], result]
    assert tiny_daemon.post({**asked, "messages": talk, "max_tokens": 2}).status == 200


PICTURES: dict[History, list[dict[str, Any]]] = {
    chat_history: [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "file", "file": {"file_data": "AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
    messages_history: [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
        },
        {"type": "audio", "data": "AAAA"},
    ],
    responses_history: [
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        {"type": "input_file", "file_data": "AAAA"},
        {"type": "input_audio", "data": "AAAA"},
    ],
}
STAND_INS = ("[an image; this", "[a document, such as a PDF; this", "[a recording; this")


@pytest.mark.parametrize("history", HISTORIES)
def test_pictures_in_results(reader: PromptReader, history: History) -> None:
    """A text names each, so that an agent's conversation goes on."""
    between = "\n" if history is messages_history else ""
    for part, words in zip(PICTURES[history], STAND_INS, strict=True):
        body = history({}, [{"type": "text", "text": "Here: "}, part])
        written = reader.text(prompt_of(reader, body), lambda: None)
        assert f"Here: {between}{words} model cannot" in written


def test_pictures_inside_documents_of_results(reader: PromptReader) -> None:
    """A text stands for them too; citations in a tool's result are ignored."""
    image = PICTURES[messages_history][0]
    source = {"type": "content", "content": [{"type": "text", "text": "Here: "}, image]}
    document = {"type": "document", "source": source, "citations": {"enabled": True}}
    found = {"type": "search_result", "source": "s", "title": "t", "citations": {"enabled": True}}
    for block in (document, {**found, "content": [{"type": "text", "text": "Here."}]}):
        prompt_of(reader, messages_history({}, [block]))


@pytest.mark.parametrize("history", HISTORIES)
def test_pictures_of_users_are_refused(reader: PromptReader, history: History) -> None:
    for part in PICTURES[history][:2]:
        refusal(reader, history({}, "Nothing.", [part]))


def test_claude_code_drops_refused_blocks(reader: PromptReader) -> None:
    """It looks for these words, and sends the message again without the block."""
    image, document, _ = PICTURES[messages_history]
    for part, words in (
        (image, "Could not process image: "),
        (document, "does not support PDF input: "),
    ):
        assert words in refusal(reader, messages_history({}, "Nothing.", [part])).message


@pytest.mark.parametrize("history", HISTORIES)
def test_half_a_surrogate_pair(reader: PromptReader, history: History) -> None:
    """It is read as U+FFFD, wherever it stands."""
    body = history({"where": "HALF"}, "a HALF", "b HALF")
    whole, half = (
        json.dumps(body[1]).replace("HALF", character) for character in ("\ufffd", "\\ud83d")
    )
    assert prompt_of(reader, body, half.encode()) == prompt_of(reader, body, whole.encode())
