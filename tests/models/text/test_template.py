"""Conversations become prompts, whatever the model's template knows."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.models.errors import TemplateError
from umbel.models.load.loader import LoadedModel
from umbel.models.text.conversation import Conversation, Message, ToolCall, ToolChoice
from umbel.models.text.formats import ReasoningFormat
from umbel.models.text.json_text import whole_characters
from umbel.models.text.output import OutputParser
from umbel.models.text.template import ChatTemplate

from ...tiny import CHAT_TEMPLATE
from .outputs import GENERIC, TOOLS, WEATHER, parts_of
from .templates import (
    ALTERNATING,
    NINE_LETTER_IDS,
    NO_SYSTEM,
    OBJECTS,
    OPEN_CALLS,
    THINKING,
    model_with,
    template_of,
)

ASKS = Message(role="user", content="What is it like in Paris?")
CALLS = Message(
    role="assistant",
    content="Let me look.",
    tool_calls=[ToolCall(id="call_1", name="get_weather", arguments='{"city":"Paris"}')],
)
RAINS = Message(role="tool", content="Rain.", tool_call_id="call_1")
SYSTEM = Message(role="system", content="You are brief.")
TALK = [SYSTEM, ASKS, CALLS, RAINS]


def talk(*messages: Message, **kwargs: Any) -> Conversation:
    return Conversation(messages=list(messages), **kwargs)


def test_generic_form_is_the_known_rendering(smollm2: LoadedModel) -> None:
    template = smollm2.text.template
    assert not template.abilities.tools
    text = template.render(talk(*TALK, tools=[WEATHER]))
    system, _, rest = text.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nYou are brief.\n\n# Functions\n")
    (line,) = (line for line in system.splitlines() if line.startswith('{"name": "get_'))
    assert json.loads(line) == {
        "name": "get_weather",
        "description": "Looks out of the window.",
        "parameters": WEATHER.parameters,
    }
    assert rest == (
        "<|im_start|>user\nWhat is it like in Paris?<|im_end|>\n"
        "<|im_start|>assistant\nLet me look.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city":"Paris"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nRain.\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_generic_results_in_a_row_are_one_message(smollm2: LoadedModel) -> None:
    more = Message(role="tool", content="Noon.", tool_call_id="call_2")
    text = smollm2.text.template.render(talk(*TALK, more, tools=TOOLS))
    assert (
        "<|im_start|>user\n<tool_response>\nRain.\n</tool_response>\n"
        "<tool_response>\nNoon.\n</tool_response><|im_end|>\n"
    ) in text


def test_other_tools_share_the_system_prompt(smollm2: LoadedModel) -> None:
    render = smollm2.text.template.render
    one, other, again = (
        render(talk(SYSTEM, ASKS, tools=tools)) for tools in (TOOLS, TOOLS[::-1], TOOLS)
    )
    assert one == again != other
    assert one.startswith("<|im_start|>system\nYou are brief.")
    assert other.startswith("<|im_start|>system\nYou are brief.")


@pytest.mark.parametrize(
    "choice", [ToolChoice(mode="none"), ToolChoice(mode="required", name="get_weather")]
)
def test_tool_choice_changes_no_prompt(smollm2: LoadedModel, choice: ToolChoice) -> None:
    for template in (smollm2.text.template, template_of(THINKING, "json_tools")):
        forced = talk(*TALK, tools=TOOLS, tool_choice=choice)
        assert template.render(forced) == template.render(talk(*TALK, tools=TOOLS))


def test_a_template_that_knows_tools_renders_them() -> None:
    template = template_of(THINKING, "json_tools")
    assert template.abilities.tools
    text = template.render(talk(*TALK, tools=[WEATHER]))
    assert "# Functions" not in text
    assert "<tools>" in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Paris"}}' in text
    assert "<tool_response>\nRain.\n</tool_response>" in text


def test_arguments_go_to_a_template_as_it_takes_them() -> None:
    assert template_of(THINKING, "json_tools").abilities.arguments_as_text
    template = template_of(OBJECTS, "qwen3_coder")
    assert template.abilities.tools
    assert not template.abilities.arguments_as_text
    assert "<parameter=city>\nParis\n</parameter>" in template.render(talk(*TALK, tools=TOOLS))


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ('{"city": "Paris", "days": [1, 2', {"city": "Paris", "days": "[1, 2]"}),
        ('{"city": "Par', {}),
        ("{", {}),
        ("", {}),
        ("null", {}),
        ("[1]", {"arguments": "[1]"}),
        ('"x"', {"arguments": '"x"'}),
        ("5", {"arguments": "5"}),
        ("city=Paris", {"arguments": "city=Paris"}),
        ("{'city': 'Paris'}", {"arguments": "{'city': 'Paris'}"}),
        ("[" * 5000, {"arguments": "[" * 5000}),
        ('{"a":' * 5000, {"arguments": '{"a":' * 5000}),
    ],
)
def test_arguments_that_are_no_object(sent: str, told: dict[str, str]) -> None:
    template = template_of(OBJECTS, "qwen3_coder")
    called = ToolCall(id="1", name="get_time", arguments=sent)
    text = template.render(talk(ASKS, Message(role="assistant", tool_calls=[called]), tools=TOOLS))
    written = "".join(f"<parameter={key}>\n{told[key]}\n</parameter>\n" for key in told)
    assert f"<function=get_time>\n{written}</function>" in text


def test_a_template_without_a_parser_is_not_asked_to_render_tools() -> None:
    template = ChatTemplate(template_of(THINKING, "json_tools")._render, GENERIC)
    assert not template.abilities.tools
    assert "# Functions" in template.render(talk(ASKS, tools=TOOLS))


def test_ids_that_a_template_refuses_are_shortened() -> None:
    template = template_of(NINE_LETTER_IDS, "json_tools")
    assert template.abilities.tools
    assert not template.abilities.any_id
    text = template.render(talk(*TALK, tools=TOOLS))
    ids = [part.partition("]")[0] for part in text.split("[id=")[1:]]
    assert len(ids) == 2
    assert ids[0] == ids[1] != "call_1"
    short = ToolCall(id="abcdefghi", name="get_time", arguments="{}")
    assert "[id=abcdefghi]" in template.render(
        talk(ASKS, Message(role="assistant", tool_calls=[short]), tools=TOOLS)
    )


def test_calls_that_only_the_answers_end_ends() -> None:
    template = template_of(OPEN_CALLS, "mistral")
    assert template.abilities.tools
    assert template.abilities.call_text.startswith("[TOOL_CALLS]umbel_probe_tool[ARGS]{")
    assert template.abilities.call_text.endswith("}")
    assert template.render(talk(*TALK, tools=TOOLS)).endswith(
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}</s>[tool]Rain.[assistant]'
    )


def test_late_system_messages_where_only_the_first_may_be_one() -> None:
    late = [Message(role="system", content=f"Note {i}.") for i in (1, 2)]
    text = template_of(ALTERNATING).render(talk(SYSTEM, late[0], ASKS, late[1]))
    assert text == (
        "[system]You are brief.\n\nNote 1.[user]What is it like in Paris?\n\nNote 2.[assistant]"
    )


def test_late_system_messages_where_a_template_takes_them(smollm2: LoadedModel) -> None:
    late = Message(role="system", content="Note.")
    text = smollm2.text.template.render(talk(SYSTEM, ASKS, late))
    assert text.endswith("<|im_start|>system\nNote.<|im_end|>\n<|im_start|>assistant\n")


def test_system_messages_of_a_template_without_them() -> None:
    template = template_of(NO_SYSTEM)
    assert template.render(talk(SYSTEM, ASKS)) == (
        "[user]You are brief.\n\nWhat is it like in Paris?[assistant]"
    )
    assert template.render(talk(SYSTEM, ASKS, tools=TOOLS)).startswith(
        "[user]You are brief.\n\n# Functions\n"
    )


def test_thinking() -> None:
    template = template_of(THINKING, "json_tools")
    assert template.abilities.thinking_switch
    assert not template_of(ALTERNATING).abilities.thinking_switch
    thinks = template.render(talk(ASKS, options={"enable_thinking": True}))
    assert template.opens_reasoning(thinks)
    not_now = template.render(talk(ASKS, options={"enable_thinking": False}))
    assert not template.opens_reasoning(not_now)
    assert not template.opens_reasoning(template.render(talk(ASKS), generation_prompt=False))
    quoted = Message(role="user", content="What does <think> mean?")
    assert not template_of(ALTERNATING).opens_reasoning(
        template_of(ALTERNATING).render(talk(quoted))
    )


def test_earlier_thoughts_go_to_the_template() -> None:
    template = template_of(THINKING, "json_tools")
    thought = Message(
        role="assistant", reasoning="Rainy?", tool_calls=CALLS.tool_calls, content="Let me look."
    )
    assert "Rainy?" in template.render(talk(ASKS, thought, RAINS, tools=TOOLS))
    assert "Rainy?" not in template.render(talk(ASKS, thought, RAINS, ASKS, tools=TOOLS))


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "tools"])
def test_an_option_cannot_take_the_place_of_the_template(smollm2: LoadedModel, name: str) -> None:
    with pytest.raises(TemplateError, match=f"'{name}' is not an option"):
        smollm2.text.template.render(talk(ASKS, options={name: "{{ 1 }}"}))


def test_a_template_that_raises_is_a_template_error() -> None:
    template = template_of("{{ raise_exception('never') }}", "json_tools")
    with pytest.raises(TemplateError, match="never"):
        template.render(talk(*TALK, tools=TOOLS))


PARTS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}"
    "{% endfor %}"
)


def test_content_is_given_in_parts_to_a_template_that_shows_no_other() -> None:
    text = template_of(PARTS).render(talk(SYSTEM, ASKS))
    assert text == f"[system]{SYSTEM.content}[user]{ASKS.content}"


def test_a_template_that_shows_no_words_is_refused() -> None:
    with pytest.raises(TemplateError, match="does not show messages"):
        template_of("{% for m in messages %}[{{ m.role }}]{% endfor %}").render(talk(ASKS))


def test_answers_in_a_row_are_one_where_roles_must_alternate() -> None:
    template = template_of(ALTERNATING)
    said = [Message(role="assistant", content=words) for words in ("One.", "Two.")]
    text = template.render(talk(ASKS, *said, ASKS))
    asked = f"[user]{ASKS.content}"
    assert text == f"{asked}[assistant]One.\n\nTwo.{asked}[assistant]"
    strict = ALTERNATING.replace(
        "{%- for m",
        "{%- if messages[0].role == 'assistant' %}"
        "{{ raise_exception('the user first') }}{% endif %}{%- for m",
        1,
    )
    text = template_of(strict).render(talk(said[0], ASKS))
    assert text == f"[user][assistant]One.{asked}[assistant]"
    assert template.render(talk(said[0], ASKS)) == f"[assistant]One.{asked}[assistant]"


def test_calls_in_a_row_stay_messages_of_their_own() -> None:
    said = Message(role="assistant", content="One.")
    text = template_of(NINE_LETTER_IDS).render(talk(ASKS, said, said, ASKS))
    assert text.count("[assistant]One.") == 2


HALVES = st.sampled_from(
    ["\\ud83d", "\\uDE00", "\\ud83d\\ude00", "\\\\", "\\u0041", "\\n", "ud83d", "a", "\\\\ud83d"]
)


@given(st.lists(HALVES, max_size=8))
def test_halves_of_surrogate_pairs_become_replacement_characters(pieces: list[str]) -> None:
    text = f'"{"".join(pieces)}"'.encode()
    mended = whole_characters(text)
    expected = json.loads(text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert msgspec.json.decode(text if mended is None else mended) == expected
    if mended is None:
        assert msgspec.json.decode(text) == json.loads(text)


@pytest.mark.parametrize(
    ("start", "end", "special"),
    [
        ("[THINK]", "[/THINK]", True),
        ("<seed:think>", "</seed:think>", False),
        ("<thinking>", "</thinking>", True),
    ],
)
def test_paired_thought_markers(tmp_path: Path, start: str, end: str, special: bool) -> None:  # noqa: FBT001
    codec = model_with(tmp_path, CHAT_TEMPLATE, (start, end), special=special).text
    assert codec.template.form.reasoning == ReasoningFormat(start, end)
    detokenizer = codec.detokenizer(codec.markup_tokens)
    parser = OutputParser(codec.template.form)
    tokens = codec.encode(f"{start} the agent {end} reads", special_tokens=False)
    events = [event for token in tokens for event in parser.push(detokenizer.push(token))]
    assert parts_of(events + parser.flush()) == [("thought", "the agent"), ("text", "reads")]


def test_thought_markers_of_the_template_alone(tmp_path: Path) -> None:
    cut = "{# <mind:think> … </mind:think> #}" + CHAT_TEMPLATE
    form = model_with(tmp_path / "a", cut).text.template.form
    assert form.reasoning == ReasoningFormat("<mind:think>", "</mind:think>")


def test_one_thought_marker_alone_is_none(tmp_path: Path) -> None:
    form = model_with(tmp_path, CHAT_TEMPLATE, ("[THINK]",), special=True).text.template.form
    assert form.reasoning is None
