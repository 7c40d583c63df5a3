"""Bodies of Anthropic's messages: the requests they become, and refusals."""

from typing import Any

import msgspec
import pytest

from umbel.daemon.http.bodies import decode
from umbel.daemon.http.failures import APIError
from umbel.daemon.protocols.content import hidden_in, sign
from umbel.daemon.protocols.generation_request import GenerationRequest
from umbel.daemon.protocols.messages import CountRequest, MessagesRequest
from umbel.models.text.conversation import (
    CacheHint,
    Conversation,
    JSONSchema,
    Message,
    Tool,
    ToolCall,
    ToolChoice,
)

HELLO = {"role": "user", "content": "hello"}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1.329.0a8; cc_entrypoint=sdk-cli;"
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"b": 1, "a": "ü"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "seen"}
EPHEMERAL = {"type": "ephemeral"}


def request(kind: type[CountRequest] = MessagesRequest, **fields: Any) -> GenerationRequest:
    """Read a body that differs from a good one in some fields; `...` leaves a field out."""
    body = {"messages": [HELLO], "max_tokens": 8, **fields}
    raw = msgspec.json.encode({key: value for key, value in body.items() if value is not ...})
    return decode(raw, kind).generation_request(lambda: None)


def conversation(**fields: Any) -> Conversation:
    (prompt,) = request(**fields).prompts
    assert isinstance(prompt, Conversation)
    return prompt


def said(*messages: dict[str, Any], **fields: Any) -> list[Message]:
    return conversation(messages=list(messages), **fields).messages


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def marked(block: dict[str, Any]) -> dict[str, Any]:
    return {**block, "cache_control": EPHEMERAL}


def refusal(**fields: Any) -> APIError:
    with pytest.raises(APIError) as refused:
        request(**fields)
    assert refused.value.status == 400
    return refused.value


class TestHints:
    """Cache marks, which change nothing else."""

    def test_marks_change_no_message(self) -> None:
        """Null is none; a `ttl` and a mark of the whole body are ignored."""
        assert said(user(marked(text("hello"))), cache_control=EPHEMERAL) == said(HELLO)
        plain = conversation(
            messages=[user({**text("hello"), "cache_control": None})],
            cache_control={**EPHEMERAL, "ttl": "1h"},
        )
        assert plain.hints == []

    def test_marks_in_the_system_prompt(self) -> None:
        """Offsets are in characters, without blocks that are left out."""
        header, empty = marked(text(BILLING)), marked(text(""))
        blocks = [header, marked(text("ab")), empty, text("cde"), marked(text("f"))]
        told = conversation(system=blocks)
        assert told.messages[0].content == "ab\ncde\nf"
        assert told.hints == [CacheHint(0, 2), CacheHint(0, 2), CacheHint(0, 8)]
        among = conversation(messages=[HELLO, {"role": "system", "content": blocks}])
        assert among.hints == [CacheHint(1, 2), CacheHint(1, 2), CacheHint(1, 8)]

    def test_marks_in_messages(self) -> None:
        """Results are messages of their own; a call ends its message."""
        plain = {"type": "text", "media_type": "text/plain", "data": "It rained."}
        document = {"type": "document", "source": plain, "title": "Diary"}
        inner = {"type": "content", "content": [marked(text("x"))]}
        told = conversation(
            messages=[
                user(marked(document), text("Why?"), {"type": "document", "source": inner}),
                assistant(marked(text("I ")), text("look."), marked(CALL)),
                user(marked(text("So?")), {**marked(RESULT), "is_error": True}),
                assistant(marked({**CALL, "id": "t2"})),
                user({**marked(RESULT), "tool_use_id": "t2", "content": ""}),
            ]
        )
        diary, call, result, so = 16, 7, len("Error: seen"), 3
        assert told.hints == [
            CacheHint(0, diary),
            *(CacheHint(1, 2), CacheHint(1, call)),
            *(CacheHint(2, result), CacheHint(3, so)),
            *(CacheHint(4, 0), CacheHint(5, 0)),
        ]
        assert [m.content for m in told.messages][1:4] == ["I look.", "Error: seen", "So?"]

    def test_marks_behind_tools(self) -> None:
        """They count the tools that are offered."""
        server = {"type": "web_search_20250305", "name": "web_search"}
        tools = [marked(server), marked(TOOL), {**TOOL, "name": "gone"}, marked(server)]
        removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "gone"}}
        told = conversation(
            tools=[*tools, marked({**TOOL, "name": "see"})],
            messages=[user(removal, marked(text("hello")))],
        )
        assert [tool.name for tool in told.tools] == ["look", "see"]
        ends = [hint for hint in told.hints if hint.message is None]
        assert ends == [CacheHint(None, 1), CacheHint(None, 1), CacheHint(None, 2)]
        assert told.hints[3:] == [CacheHint(0, 5)]

    @pytest.mark.parametrize(
        "mark", [True, "ephemeral", {}, [], {"type": "persistent"}, {"type": None}, {"ttl": "5m"}]
    )
    def test_malformed_marks_are_refused(self, mark: Any) -> None:
        field = {"cache_control": mark}
        places: dict[str, dict[str, Any]] = {
            "": field,
            "system[0].": {"system": [{**text("x"), **field}]},
            "tools[0].": {"tools": [{**TOOL, **field}]},
            "messages[0].content[0].": {"messages": [user({**text("x"), **field})]},
        }
        for place, fields in places.items():
            refused = refusal(**fields)
            assert str(refused.param).startswith(f"{place}cache_control")


class TestSystem:
    def test_text_and_blocks_are_one_message(self) -> None:
        expected = [Message(role="system", content="a\nb"), Message(role="user", content="hello")]
        assert conversation(system="a\nb").messages == expected
        assert conversation(system=[text("a"), text("b")]).messages == expected

    def test_system_message_keeps_its_place(self) -> None:
        """Claude Code describes its surroundings behind the user's first words."""
        messages = said(HELLO, {"role": "system", "content": [text("a"), text("b")]})
        assert messages == [
            Message(role="user", content="hello"),
            Message(role="system", content="a\nb"),
        ]

    @pytest.mark.parametrize(
        "system",
        [
            [text(BILLING), text("Be brief.")],
            [text("Be brief."), text(BILLING)],
            [text(f"{BILLING}\nBe brief.")],
            f"{BILLING}\nBe brief.",
        ],
    )
    def test_billing_header_is_dropped(self, system: Any) -> None:
        """It differs from request to request."""
        assert conversation(system=system).messages[0] == Message(
            role="system", content="Be brief."
        )

    def test_billing_header_alone_is_no_system_prompt(self) -> None:
        header = {"role": "system", "content": BILLING}
        assert said(header, HELLO, system=BILLING) == [Message(role="user", content="hello")]

    def test_mention_of_the_billing_header_stays(self) -> None:
        """Only the beginning of a block of a system prompt counts."""
        told = f"Never send {BILLING}"
        assert conversation(system=told).messages[0].content == told
        assert said({"role": "user", "content": BILLING})[0].content == BILLING


class TestBlocks:
    def test_turn_with_a_tool(self) -> None:
        """Thinking, text and calls are one message; results come before the user's text."""
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
        messages = said(
            HELLO,
            assistant(thought, text("Let me"), text(" see."), CALL),
            user(text("So?"), RESULT),
        )
        call = ToolCall(id="t1", name="look", arguments='{"b":1,"a":"ü"}')
        assert messages[1:] == [
            Message(role="assistant", content="Let me see.", reasoning="Hm.", tool_calls=[call]),
            Message(role="tool", content="seen", tool_call_id="t1", name="look"),
            Message(role="user", content="So?"),
        ]

    def test_results_alone_are_no_message_of_the_user(self) -> None:
        assert [m.role for m in said(HELLO, assistant(CALL), user(RESULT))] == [
            *("user", "assistant", "tool")
        ]

    def test_result_that_is_an_error(self) -> None:
        found = {"type": "tool_reference", "tool_name": "look"}
        result = {**RESULT, "is_error": True, "content": [text("no"), found]}
        assert said(HELLO, assistant(CALL), user(result))[-1].content == "Error: no\nlook"
        bare = {"type": "tool_result", "tool_use_id": "t1"}
        assert said(HELLO, assistant(CALL), user(bare))[-1].content == ""

    def test_documents_and_search_results_are_text(self) -> None:
        """Title, context and source come first."""
        plain = {"type": "text", "media_type": "text/plain", "data": "It rained."}
        parts = {"type": "content", "content": [text("It"), text("rained.")]}
        document = {"type": "document", "source": plain, "title": "Diary", "context": "May"}
        found = {"type": "search_result", "source": "s", "title": "T", "content": [text("x")]}
        (message,) = said(user(document, {"type": "document", "source": parts}, found))
        assert message.content == "Diary\nMay\nIt rained.\nIt\nrained.\nT\ns\nx"

    def test_redacted_thinking_is_left_out(self) -> None:
        redacted = {"type": "redacted_thinking", "data": "abc"}
        assert said(HELLO, assistant(redacted, text("Yes.")), HELLO)[1] == Message(
            role="assistant", content="Yes."
        )

    def test_signature_carries_hidden_thinking(self) -> None:
        """Shown thinking wins; a foreign signature has none."""
        hidden = {"type": "thinking", "thinking": "", "signature": sign("Hm: ü")}
        shown = {"type": "thinking", "thinking": "shown", "signature": sign("Hm")}
        foreign = {"type": "thinking", "thinking": "", "signature": "EqQBCkYIA"}
        for block, thought in ((hidden, "Hm: ü"), (shown, "shown"), (foreign, "")):
            assert said(HELLO, assistant(block, text("Yes.")), HELLO)[1].reasoning == thought
        for broken in ("umbel.%%%", "umbel./w==", "umbel.a", "", "umbel."):
            assert hidden_in(broken) == ""

    @pytest.mark.parametrize(
        ("message", "place", "words"),
        [
            (user({"type": "image", "source": {}}), "content[0]", "this model cannot see"),
            (user(text("x"), {"type": "video"}), "content[1]", "of type 'video'"),
            (user(CALL), "content[0]", "not supported there; send text, document"),
            (assistant(RESULT), "content[0]", "not supported there; send text, thinking"),
            (assistant({"type": "robot_use"}), "content[0]", "type 'robot_use'"),
            (user({"type": "text"}), "content[0]", "missing required field `text`"),
            (
                user({"type": "document", "source": {"type": "base64"}}),
                "content[0]",
                "does not support PDF input: send the document's text",
            ),
            (user({"type": "document", "source": {"type": "text"}}), "", "a document without text"),
        ],
    )
    def test_unreadable_blocks_are_named(
        self, message: dict[str, Any], place: str, words: str
    ) -> None:
        error = refusal(messages=[message])
        assert f"messages[0].{place}" in error.message
        assert words in error.message

    def test_image_in_a_result(self) -> None:
        pdf = {"type": "document", "title": "T", "source": {"type": "base64", "data": "AA"}}
        image = {"type": "image", "source": {}}
        result = {**RESULT, "content": [text("x"), image, pdf, {"type": "resource"}]}
        read = conversation(messages=[HELLO, assistant(CALL), user(result)])
        assert read.messages[-1].content.split("\n") == [
            "x",
            "[an image; this model cannot see it]",
            "T",
            "[a document, such as a PDF; this model cannot read it]",
            "[a part of type 'resource'; this model cannot read it]",
        ]

    def test_citations_are_refused(self) -> None:
        source = {"type": "text", "data": "x"}
        document = {"type": "document", "source": source, "citations": {"enabled": True}}
        assert "citations is not supported" in refusal(messages=[user(document)]).message

    def test_result_without_a_call(self) -> None:
        error = refusal(messages=[user(RESULT)])
        assert "messages[0].content[0] is the result of a call 't1'" in error.message

    def test_deeply_nested_input(self) -> None:
        """However deep, it is read or refused with a 400."""

        def outcome(depth: int) -> str:
            nested = b'{"x":' * depth + b"1" + b"}" * depth
            call = b'{"type":"tool_use","id":"a","name":"b","input":' + nested + b"}"
            messages = b'[{"role":"assistant","content":[' + call + b"]}," + hello + b"]"
            raw = b'{"max_tokens":1,"messages":' + messages + b"}"
            try:
                decode(raw, MessagesRequest).generation_request(lambda: None)
            except APIError as error:
                return str(error.status)
            return "read"

        hello = msgspec.json.encode(HELLO)
        outcomes = [outcome(depth) for depth in range(1, 1200)]
        assert sorted(outcomes, reverse=True) == outcomes
        assert set(outcomes) == {"read", "400"}

    def test_last_message_of_the_assistant_is_refused(self) -> None:
        error = refusal(messages=[HELLO, assistant(text("The"))])
        assert "must end with a user's" in error.message

    def test_messages_without_text_are_refused(self) -> None:
        assert "no text" in refusal(messages=[{"role": "system", "content": BILLING}]).message


class TestTools:
    def test_definition_of_a_tool(self) -> None:
        tools = [{**TOOL, "strict": True, "defer_loading": True, "type": "custom"}]
        assert conversation(tools=tools).tools == [
            Tool(
                name="look",
                description="Looks.",
                parameters={"type": "object"},
                strict=True,
                place="tools.0.input_schema",
            )
        ]

    def test_tools_of_anthropic_are_left_out(self) -> None:
        """Agents offer them to every server; a choice of one is refused."""
        tools = [{"type": "web_search_20250305", "name": "web_search"}, TOOL]
        assert [tool.name for tool in conversation(tools=tools).tools] == ["look"]
        choice = {"type": "tool", "name": "web_search"}
        words = (
            "tool_choice names 'web_search', but tools does not, among those that the client runs"
        )
        assert words in refusal(tools=tools, tool_choice=choice).message
        assert words in refusal(tools=tools[:1], tool_choice=choice).message

    @pytest.mark.parametrize(
        ("tool", "words"),
        [
            ({"name": "look"}, "tools[0].input_schema: Field required"),
            ({**TOOL, "type": "function"}, "tools[0] of type 'function' is not supported"),
            ({**TOOL, "name": ""}, "tools[0] is named ''"),
            ({**TOOL, "input_schema": [1]}, "tools[0].input_schema: Expected `object"),
        ],
    )
    def test_bad_definitions(self, tool: dict[str, Any], words: str) -> None:
        assert words in refusal(tools=[tool]).message

    @pytest.mark.parametrize(
        ("choice", "expected"),
        [
            (None, ToolChoice()),
            ({"type": "auto"}, ToolChoice()),
            ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(parallel=False)),
            ({"type": "none"}, ToolChoice(mode="none")),
            ({"type": "any"}, ToolChoice(mode="required")),
            ({"type": "tool", "name": "look"}, ToolChoice(mode="required", name="look")),
        ],
    )
    def test_choice(self, choice: Any, expected: ToolChoice) -> None:
        assert conversation(tools=[TOOL], tool_choice=choice).tool_choice == expected

    def test_bad_choices(self) -> None:
        assert "there are no tools" in refusal(tool_choice={"type": "any"}).message
        missing = refusal(tools=[TOOL], tool_choice={"type": "tool"})
        assert missing.message == "tool_choice.name: Field required"

    def test_tool_removal_and_addition(self) -> None:
        look = {"type": "tool_reference", "name": "look"}
        removal, addition = ({"type": f"tool_{k}", "tool": look} for k in ("removal", "addition"))
        gone = {"role": "system", "content": [removal]}
        back = {"role": "system", "content": [addition, text("It is back.")]}
        assert conversation(tools=[TOOL], messages=[HELLO, gone]).tools == []
        again = conversation(tools=[TOOL], messages=[HELLO, gone, back])
        assert [tool.name for tool in again.tools] == ["look"]
        assert [m.content for m in again.messages] == ["hello", "It is back."]


class TestOptions:
    def test_sampling(self) -> None:
        wanted = request(temperature=0, top_p=0.5, top_k=4, stop_sequences=["x", "y"])
        assert (wanted.sampling.temperature, wanted.sampling.top_p) == (0, 0.5)
        assert (wanted.sampling.top_k, wanted.stops, wanted.max_tokens) == (4, ["x", "y"], 8)

    @pytest.mark.parametrize(
        ("fields", "options"),
        [
            ({}, {}),
            ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
            ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
            ({"thinking": {"type": "between_tools"}}, {"enable_thinking": False}),
            (
                {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
                {"enable_thinking": True},
            ),
            (
                {"output_config": {"effort": "high"}},
                {"enable_thinking": True, "reasoning_effort": "high"},
            ),
            (
                {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}},
                {"enable_thinking": False, "reasoning_effort": "low"},
            ),
        ],
    )
    def test_thinking(self, fields: dict[str, Any], options: dict[str, Any]) -> None:
        """Without a field about it, the template's default holds."""
        assert conversation(**fields).options == options

    def test_format(self) -> None:
        """It may stand in two places."""
        form = {"type": "json_schema", "schema": {"type": "object"}}
        for fields in ({"output_format": form}, {"output_config": {"format": form}}):
            assert request(**fields).constraint == JSONSchema({"type": "object"})
        assert "one of" in refusal(output_format=form, output_config={"format": form}).message

    @pytest.mark.parametrize(
        ("keep", "thoughts"),
        [
            (None, ["", "", "b", "c"]),
            ({"type": "thinking_turns", "value": 1}, ["", "", "b", "c"]),
            ({"type": "thinking_turns", "value": 2}, ["a", "", "b", "c"]),
            ("all", ["a", "", "b", "c"]),
            ({"type": "all"}, ["a", "", "b", "c"]),
        ],
    )
    def test_cleared_thinking(self, keep: Any, thoughts: list[str]) -> None:
        """A turn is everything between two messages of the user's own."""

        def thought(words: str, *more: dict[str, Any]) -> dict[str, Any]:
            return assistant({"type": "thinking", "thinking": words, "signature": ""}, *more)

        turns = [HELLO, thought("a"), HELLO, assistant(text("x")), HELLO]
        turns += [thought("b", CALL), user(RESULT), thought("c"), HELLO]
        edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
        messages = said(*turns, context_management={"edits": [edit]})
        assert [m.reasoning for m in messages if m.role == "assistant"] == thoughts

    @pytest.mark.parametrize(
        ("edit", "words"),
        [
            ({"type": "clear_tool_uses_20250919"}, "send clear_thinking_20251015 only"),
            ({"type": "clear_thinking_20251015", "keep": 3}, "at least 1"),
            (
                {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}},
                "at least 1",
            ),
        ],
    )
    def test_other_edits_are_refused(self, edit: dict[str, Any], words: str) -> None:
        assert words in refusal(context_management={"edits": [edit]}).message

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"max_tokens": ...}, "max_tokens: Field required"),
            ({"max_tokens": None}, "max_tokens: Field required"),
            ({"max_tokens": 0}, "max_tokens: Expected `int` >= 1"),
            (
                {"thinking": {"type": "enabled", "budget_tokens": 1024}},
                "max_tokens must be greater than thinking.budget_tokens",
            ),
            ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "Expected `int` >= 1024"),
            ({"container": "c"}, "container is not supported"),
            ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
            ({"stop_sequences": [""]}, "Expected `str` of length >= 1"),
            ({"system": [{"type": "image"}]}, "system[0].type: Invalid enum value 'image'"),
        ],
    )
    def test_refusals(self, fields: dict[str, Any], words: str) -> None:
        assert words in refusal(**fields).message

    def test_count_needs_no_max_tokens(self) -> None:
        assert request(CountRequest, max_tokens=...).max_tokens is None

    @pytest.mark.parametrize(
        ("user_id", "name"),
        [
            ('{"device_id":"d","session_id":"s-1"}', "s-1"),
            ("user_1", None),
            ('{"session_id":7}', None),
            ('{"session_id":"a\\nb"}', None),
            ('{"session_id":"' + "x" * 257 + '"}', None),
            (" " * 3000 + '{"session_id":"s"}', None),
            ("[" * 2000, None),
        ],
    )
    def test_session_in_user_id(self, user_id: str, name: str | None) -> None:
        """Claude Code writes JSON there; anything else is no session."""
        raw = msgspec.json.encode(
            {"messages": [HELLO], "max_tokens": 1, "metadata": {"user_id": user_id}}
        )
        assert decode(raw, MessagesRequest).session_name == name

    def test_fields_that_change_no_answer_are_ignored(self) -> None:
        """Claude Code and the SDKs send all of this."""
        extra = {
            "service_tier": "auto",
            "speed": "standard",
            "inference_geo": "us",
            "diagnostics": {"previous_message_id": None},
            "user_profile_id": "u",
            "betas": ["x"],
            "metadata": {},
            "context_management": {"edits": []},
        }
        nothing = dict.fromkeys(("container", "mcp_servers", "thinking", "tools", "top_k"))
        assert conversation(**extra, **nothing) == conversation()
