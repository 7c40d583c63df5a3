"""Items and tools of a response: the conversation they become, and refusals."""

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from umbel.daemon.http import bodies
from umbel.daemon.http.failures import APIError
from umbel.daemon.protocols.content import sign
from umbel.daemon.protocols.response_items import MAX_ITEMS, MAX_REFERRED, read_items
from umbel.daemon.protocols.responses import ReadResponse, ResponsesRequest
from umbel.models.text.conversation import Conversation, Message, ToolCall

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
    "encrypted_content": None,
}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "patch", "description": "d"}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "d",
    "tools": [{"type": "function", "name": "close"}, {"type": "function", "name": "open"}],
}


def nothing() -> None:
    pass


def decode(**fields: Any) -> ResponsesRequest:
    body = msgspec.json.decode(msgspec.json.encode(fields), type=ResponsesRequest)
    body.refuse_unsupported()
    return body


def read(past: list[bytes] | None = None, **fields: Any) -> ReadResponse:
    return decode(**fields).read(past or [], lambda _: None, nothing)


def conversation(**fields: Any) -> Conversation:
    (prompt,) = read(**fields).request.prompts
    assert isinstance(prompt, Conversation)
    return prompt


def refusal(**fields: Any) -> APIError:
    with pytest.raises(APIError) as refused:
        read(**fields)
    return refused.value


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": content}


class TestItems:
    def test_text_is_a_users_message(self) -> None:
        """It is kept as an item with an id."""
        found = read(input="hi")
        (prompt,) = found.request.prompts
        assert isinstance(prompt, Conversation)
        assert prompt.messages == [Message(role="user", content="hi")]
        (kept,) = found.items
        item = msgspec.json.decode(kept)
        assert item["id"].startswith("msg_")
        assert item["content"] == [{"type": "input_text", "text": "hi"}]

    def test_roles_and_parts(self) -> None:
        """Developers speak as the system; parts are joined; instructions come first."""
        parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
        refused = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "refusal", "refusal": "no"}],
        }
        found = conversation(
            instructions="be kind",
            input=[
                {"role": "developer", "content": "d"},
                user("u"),
                refused,
                {"role": "user", "content": parts},
            ],
        )
        assert [(m.role, m.content) for m in found.messages] == [
            *(("system", "be kind"), ("system", "d"), ("user", "u")),
            *(("assistant", "no"), ("user", "ab")),
        ]

    def test_items_of_an_answer_are_one_message(self) -> None:
        """Reasoning, text and calls of one turn; the outputs name their tools."""
        second = CALL | {"call_id": "c2", "name": "close", "namespace": "agents"}
        found = conversation(
            input=[
                user("u"),
                REASONING,
                said("let me add"),
                CALL,
                second,
                OUTPUT,
                OUTPUT | {"call_id": "c2"},
            ]
        )
        assert found.messages[1] == Message(
            role="assistant",
            content="let me add",
            reasoning="hm",
            tool_calls=[
                ToolCall(id="c1", name="add", arguments='{"a":1}'),
                ToolCall(id="c2", name="agents__close", arguments='{"a":1}'),
            ],
        )
        results = [(m.role, m.content, m.tool_call_id, m.name) for m in found.messages[2:]]
        assert results == [("tool", "2", "c1", "add"), ("tool", "2", "c2", "agents__close")]

    def test_consecutive_answers_stay_apart(self) -> None:
        """A call behind an output begins another answer; so does a text behind a text."""
        again = CALL | {"call_id": "c2"}
        found = conversation(input=[user("u"), CALL, OUTPUT, again, OUTPUT | {"call_id": "c2"}])
        assert [m.role for m in found.messages] == [
            "user",
            "assistant",
            "tool",
            "assistant",
            "tool",
        ]
        found = conversation(input=[said("a"), said("b")])
        assert [m.content for m in found.messages] == ["a", "b"]

    def test_custom_calls_are_calls(self) -> None:
        """Their text is the argument of a function."""
        made = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"'}
        output = {
            "type": "custom_tool_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "ok"}],
        }
        found = conversation(input=[user("u"), made, output])
        (call,) = found.messages[1].tool_calls
        assert msgspec.json.decode(call.arguments) == {"input": 'a "b"'}
        assert found.messages[2].content == "ok"

    def test_summary_replaces_reasoning(self) -> None:
        """A client may have kept no more."""
        item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}
        assert conversation(input=[item, said("a")]).messages[0].reasoning == "s"

    def test_encrypted_reasoning_comes_back(self) -> None:
        """Another server's says nothing."""
        item = {"type": "reasoning", "summary": [], "encrypted_content": sign("Hm: ü")}
        assert conversation(input=[item, said("a")]).messages[0].reasoning == "Hm: ü"
        foreign = item | {"encrypted_content": "gAAAA"}
        assert conversation(input=[foreign, said("a")]).messages[0].reasoning == ""

    def test_hosted_calls_are_left_out(self) -> None:
        """They stand in a session that began elsewhere; their tools are left out too."""
        search = {"type": "web_search_call", "id": "ws", "status": "completed", "action": {}}
        shot = {"type": "computer_call_output", "call_id": "c", "output": {"type": "screenshot"}}
        found = read(input=[user("u"), search, said("a"), shot, user("v")])
        (prompt,) = found.request.prompts
        assert isinstance(prompt, Conversation)
        assert [m.content for m in prompt.messages] == ["u", "a", "v"]
        assert len(found.items) == 3

    def test_past_comes_first(self) -> None:
        """It is of the same kind as the input, and calls in it can be answered."""
        past = read(input=[user("u"), CALL]).items
        found = read(past, input=[OUTPUT], instructions="i")
        (prompt,) = found.request.prompts
        assert isinstance(prompt, Conversation)
        assert [m.role for m in prompt.messages] == ["system", "user", "assistant", "tool"]
        assert len(found.items) == 1

    def test_kept_items_are_read_alike(self) -> None:
        made = {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "x"}
        items = [
            user("u"),
            REASONING,
            said("a"),
            CALL,
            OUTPUT,
            made,
            {"role": "system", "content": "s"},
        ]
        found = read(input=items)
        (first,), (second,) = found.request.prompts, read(found.items, input=[]).request.prompts
        assert first == second
        assert all(msgspec.json.decode(kept)["id"] for kept in found.items)

    def test_item_references(self) -> None:
        stored = {"msg_9": msgspec.json.encode(said("before"))}
        raws = [Raw(b'{"type": "item_reference", "id": "msg_9"}')]
        found = read_items([], raws, stored.get, nothing)
        assert found.messages == [Message(role="assistant", content="before")]
        with pytest.raises(APIError, match="item 'msg_9' that is not stored") as refused:
            read_items([], raws, lambda _: None, nothing)
        assert refused.value.status == 404

    def test_item_references_are_bounded(self) -> None:
        """A small body cannot ask for a large one many times."""
        large = msgspec.json.encode(user("x" * (MAX_REFERRED // 3)))
        raws = [Raw(b'{"type": "item_reference", "id": "m"}')] * 3
        asked: list[str] = []

        def find(name: str) -> bytes:
            asked.append(name)
            return large

        with pytest.raises(APIError, match="over 16 MiB"):
            read_items([], raws, find, nothing)
        assert asked == ["m"]
        assert len(read_items([], raws[:2], find, nothing).messages) == 2


class TestBadItems:
    @pytest.mark.parametrize(
        ("item", "words", "param"),
        [
            ({"type": "robot_call", "id": "r"}, "of type 'robot_call' is not", "input[0]"),
            ({"content": "a"}, "needs role", "input[0].role"),
            ({"role": "user"}, "needs content", "input[0].content"),
            ({"role": "robot", "content": "a"}, "Invalid enum value", "input[0].role"),
            ({"role": "user", "content": 1}, "Expected", "input[0].content"),
            (
                {"role": "user", "content": [{"type": "input_image"}]},
                "'input_image'",
                "input[0].content",
            ),
            (
                {"type": "function_call", "name": "a", "arguments": ""},
                "needs call_id",
                "input[0].call_id",
            ),
            (
                {"type": "custom_tool_call", "call_id": "c", "name": "a"},
                "needs input",
                "input[0].input",
            ),
            (OUTPUT, "'c1' that no item before it asks for", "input[0].call_id"),
            (
                {"type": "reasoning", "content": [{"text": 1}]},
                "reasoning that is no text",
                "input[0].content",
            ),
            ({"type": "item_reference"}, "not stored", "input[0]"),
            ("text", "Expected `object`", "input[0]"),
        ],
    )
    def test_faults_name_their_item(self, item: Any, words: str, param: str) -> None:
        error = refusal(input=[item])
        assert words in error.message
        assert error.param == param

    def test_too_many_items(self) -> None:
        """The past counts."""
        assert "length <= 10000" in refusal(input=[user("u")] * (MAX_ITEMS + 1)).message
        past = [msgspec.json.encode(user("u"))] * MAX_ITEMS
        assert "over 10000 items" in refusal(past=past, input="hi").message

    @pytest.mark.parametrize("given", [None, 1, {}])
    def test_input_of_a_wrong_type(self, given: Any) -> None:
        assert refusal(input=given).param == "input"

    def test_missing_output_is_named(self) -> None:
        wanting = {"type": "function_call_output", "call_id": "c1"}
        assert refusal(input=[CALL, wanting]).param == "input[1].output"

    def test_empty_input(self) -> None:
        assert "has no items" in refusal(input=[]).message


class TestTools:
    def test_grammar_is_in_the_description(self) -> None:
        """Codex' apply_patch has one; the model is not held to it."""
        grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
        (tool,) = read(input="hi", tools=[PATCH | {"format": grammar}]).tools.tools
        assert tool.description.split("\n") == [
            *("d", "", "The input matches this lark grammar:"),
            'start: "*** Begin Patch"',
        ]
        (plain,) = read(input="hi", tools=[PATCH | {"format": {"type": "text"}}]).tools.tools
        assert plain.description == "d"
        assert plain.parameters == tool.parameters

    def test_namespaces_are_flat_to_the_model(self) -> None:
        """Calls carry the client's names."""
        found = read(input="hi", tools=[ADD, AGENTS, PATCH])
        assert [tool.name for tool in found.tools.tools] == [
            "add",
            "agents__close",
            "agents__open",
            "patch",
        ]
        assert found.tools.called["agents__close"] == ("close", "agents", False)
        assert found.tools.called["patch"] == ("patch", None, True)
        assert len(found.tools.shown) == 3
        patch = found.tools.tools[-1]
        assert patch.parameters["required"] == ["input"]

    def test_hosted_tools_are_left_out(self) -> None:
        """Codex always sends one."""
        hosted = [
            {"type": kind} for kind in ("web_search", "web_search_2025_08_26", "mcp", "local_shell")
        ]
        found = read(input="hi", tools=[ADD, *hosted])
        assert [tool.name for tool in found.tools.tools] == ["add"]
        assert len(found.tools.shown) == 1

    def test_large_tools_are_read_one_by_one(self) -> None:
        """Together they have more bytes than one call decodes."""
        tools = [
            ADD | {"name": f"f{number}", "description": "x" * 100_000} for number in range(128)
        ]
        raw = msgspec.json.encode({"input": "hi", "tools": tools})
        body = bodies.decode(raw, ResponsesRequest)
        assert len(raw) > bodies.MAX_PART
        assert len(body.read([], lambda _: None, nothing).tools.tools) == 128

    @pytest.mark.parametrize(
        ("tools", "choice", "mode", "name", "told"),
        [
            ([ADD, PATCH], None, "auto", None, 2),
            ([ADD, PATCH], "none", "none", None, 2),
            ([ADD, PATCH], "required", "required", None, 2),
            ([ADD, PATCH], {"type": "function", "name": "add"}, "required", "add", 2),
            ([ADD, PATCH], {"type": "custom", "name": "patch"}, "required", "patch", 2),
            (
                [AGENTS],
                {"type": "function", "name": "open", "namespace": "agents"},
                "required",
                "agents__open",
                2,
            ),
            (
                [ADD, PATCH],
                {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "add"}],
                },
                "auto",
                None,
                1,
            ),
            (
                [ADD, PATCH],
                {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "custom", "name": "patch"}],
                },
                "required",
                None,
                1,
            ),
        ],
    )
    def test_choices(self, tools: Any, choice: Any, mode: str, name: str | None, told: int) -> None:
        """Allowed tools are the only ones in the prompt."""
        found = conversation(input="hi", tools=tools, tool_choice=choice)
        assert (found.tool_choice.mode, found.tool_choice.name) == (mode, name)
        assert len(found.tools) == told

    def test_parallel_tool_calls(self) -> None:
        assert conversation(input="hi", tools=[ADD]).tool_choice.parallel
        found = conversation(input="hi", tools=[ADD], parallel_tool_calls=False)
        assert not found.tool_choice.parallel

    @pytest.mark.parametrize(
        ("fields", "words", "param"),
        [
            ({"tools": [{"type": "robot"}]}, "of type 'robot' is not supported", "tools[0]"),
            ({"tools": [{"type": "function"}]}, "tools[0] has no name", "tools[0].name"),
            ({"tools": [ADD | {"name": "a b"}]}, "tools[0] is named 'a b'", "tools[0]"),
            ({"tools": [{"type": "web_search"}, ADD, ADD]}, "tools[2]: there are two", "tools[2]"),
            ({"tools": [AGENTS | {"name": ""}]}, "namespace without a name", "tools[0].name"),
            (
                {"tools": [AGENTS | {"tools": [{"type": "function", "name": "é"}]}]},
                "tools[0].tools[0] is named",
                "tools[0].tools[0]",
            ),
            (
                {"tools": [AGENTS | {"tools": [AGENTS]}]},
                "tools[0].tools[0] of type 'namespace'",
                "tools[0].tools[0]",
            ),
            (
                {"tools": [PATCH | {"format": {"type": "magic"}}]},
                "tools[0].format of type 'magic' is not supported",
                "tools[0].format of type 'magic'",
            ),
            (
                {
                    "tools": [
                        AGENTS
                        | {"tools": [{"type": "function", "name": f"n{i}"} for i in range(1000)]}
                    ]
                    * 2
                },
                "over 1024 tools",
                "tools",
            ),
            ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
            (
                {"tool_choice": "required", "tools": [{"type": "mcp"}]},
                "there are no tools",
                "tool_choice",
            ),
            (
                {"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}},
                "names 'x'",
                "tool_choice",
            ),
            (
                {"tools": [ADD], "tool_choice": {"type": "web_search"}},
                "tool_choice is 'web_search'",
                "tool_choice",
            ),
            (
                {
                    "tools": [ADD],
                    "tool_choice": {
                        "type": "allowed_tools",
                        "mode": "auto",
                        "tools": [{"type": "mcp"}],
                    },
                },
                "allows 'mcp'",
                "tool_choice",
            ),
            (
                {
                    "tools": [ADD],
                    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [1]},
                },
                "allows '1'",
                "tool_choice",
            ),
        ],
    )
    def test_faults_name_their_tool(self, fields: dict[str, Any], words: str, param: str) -> None:
        error = refusal(input="hi", **fields)
        assert error.status == 400
        assert words in error.message
        assert error.param == param


class TestFields:
    def test_format_without_a_schema(self) -> None:
        lacking = {"format": {"type": "json_schema", "name": "n"}}
        assert refusal(input="hi", text=lacking).param == "text.format.schema"

    def test_sampling(self) -> None:
        """Fields of responses, and those that other endpoints have."""
        request = read(
            input="hi", temperature=0.5, top_p=0.9, max_output_tokens=7, stop="x", top_k=3
        ).request
        assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.9)
        assert (request.max_tokens, request.stops, request.sampling.top_k) == (7, ["x"], 3)
        assert request.sampling.top_logprobs is None
        included = ["message.output_text.logprobs", "reasoning.encrypted_content"]
        request = read(input="hi", include=included, top_logprobs=2).request
        assert request.sampling.top_logprobs == 2
        assert read(input="hi", include=included).request.sampling.top_logprobs == 0

    def test_effort_reaches_the_template(self) -> None:
        found = conversation(input="hi", reasoning={"effort": "low", "summary": "auto"})
        assert found.options == {"reasoning_effort": "low", "enable_thinking": True}

    def test_conversation_and_session_names(self) -> None:
        """A thread is stronger than a cache key."""
        assert decode(input="hi", conversation="c").conversation_name == "c"
        assert decode(input="hi", conversation={"id": "c"}).conversation_name == "c"
        assert decode(input="hi", prompt_cache_key="k").session_name == "k"
        metadata = {"session_id": "s", "thread_id": "t"}
        assert (
            decode(input="hi", prompt_cache_key="k", client_metadata=metadata).session_name == "t"
        )
        assert (
            decode(input="hi", client_metadata={"thread_id": "\n", "session_id": "s"}).session_name
            == "s"
        )
        assert decode(input="hi", client_metadata={"thread_id": 1}).session_name is None

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"n": 2}, "n"),
            ({"include": ["everything"]}, "include"),
            ({"top_logprobs": 3}, "top_logprobs"),
        ],
    )
    def test_refused_values(self, fields: dict[str, Any], param: str) -> None:
        assert refusal(input="hi", **fields).param == param
