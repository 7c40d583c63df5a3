"""Answers of models that write harmony, and their conversations: channels, headers, calls."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.models.text.calls import MalformedCallError, read_calls
from umbel.models.text.codec import TextCodec
from umbel.models.text.conversation import Conversation, Message, ToolCall
from umbel.models.text.events import (
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from umbel.models.text.formats import HARMONY
from umbel.models.text.harmony import TOKENS
from umbel.models.text.history import encode_prompt, read_answer
from umbel.models.text.output import OutputParser

from . import templates
from .outputs import TOOLS, Part, events_of, parts, parts_of
from .templates import model_with, template_of

THOUGHT = "<|channel|>analysis<|message|>Hm. Rain?<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ARGUMENTS = '{"city": "Paris"}'
IN_CHANNEL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
IN_ROLE = " to=functions.get_weather<|channel|>commentary json<|message|>"
LOOK = "<|channel|>commentary<|message|>I look."
HM: Part = ("thought", "Hm. Rain?")
PARIS: Part = ("call", "get_weather", {"city": "Paris"})
ANSWERS: dict[str, tuple[str, list[Part]]] = {
    "words": (f"{FINAL}It rains.", [("text", "It rains.")]),
    "thoughts and words": (f"{THOUGHT}{NEXT}{FINAL}It rains.", [HM, ("text", "It rains.")]),
    "ended words": (f"{THOUGHT}{NEXT}{FINAL}It rains.<|return|>", [HM, ("text", "It rains.")]),
    "thoughts twice": (
        f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}So.",
        [("thought", "Hm. Rain?Hm. Rain?"), ("text", "So.")],
    ),
    "a call": (f"{THOUGHT}{NEXT}{IN_CHANNEL}{ARGUMENTS}", [HM, PARIS]),
    "an ended call": (f"{THOUGHT}{NEXT}{IN_CHANNEL}{ARGUMENTS}<|call|>", [HM, PARIS]),
    "the recipient in the role": (f"{THOUGHT}{NEXT}{IN_ROLE}{ARGUMENTS}<|call|>", [HM, PARIS]),
    "the recipient first": (f"{IN_ROLE}{ARGUMENTS}", [PARIS]),
    "no type": (f"<|channel|>commentary to=functions.get_weather<|message|>{ARGUMENTS}", [PARIS]),
    "no blank": (f"{IN_CHANNEL.replace(' <|c', '<|c')}{ARGUMENTS}", [PARIS]),
    "a call while thinking": (
        f"<|channel|>analysis to=functions.get_weather code<|message|>{ARGUMENTS}<|call|>",
        [PARIS],
    ),
    "no namespace": (f"<|channel|>commentary to=get_weather<|message|>{ARGUMENTS}", [PARIS]),
    "an unknown tool": (
        f"<|channel|>commentary to=browser.search<|message|>{ARGUMENTS}",
        [("call", "browser.search", {"city": "Paris"})],
    ),
    "two calls": (
        f"{IN_CHANNEL}{ARGUMENTS}<|end|>{NEXT}{IN_ROLE}{ARGUMENTS}<|call|>",
        [PARIS, PARIS],
    ),
    "words before a call": (
        f"{THOUGHT}{NEXT}{LOOK}<|end|>{NEXT}{IN_CHANNEL}{ARGUMENTS}",
        [HM, ("text", "I look."), PARIS],
    ),
    "words behind a call": (
        f"{IN_CHANNEL}{ARGUMENTS}<|end|>{NEXT}{FINAL}Done.",
        [PARIS, ("text", "Done.")],
    ),
    "arguments named as a call": (
        f'{IN_CHANNEL}{{"name": "x", "arguments": {{}}}}',
        [("call", "get_weather", {"name": "x", "arguments": {}})],
    ),
    "an end in a string": (
        f'{IN_CHANNEL}{{"city": "<|call|>\\"}}"}}<|call|>',
        [("call", "get_weather", {"city": '<|call|>"}'})],
    ),
    "a type of words": (f"{FINAL[:-11]} <|constrain|>json<|message|>{{}}", [("text", "{}")]),
    "blanks around markers": (f"{THOUGHT}\n{NEXT} {FINAL} So.\n<|end|>\n", [HM, ("text", "So.")]),
    "no end of thoughts": (f"{FINAL}a{THOUGHT}{NEXT}{FINAL}b", [("text", "a"), HM, ("text", "b")]),
    "thoughts only": ("<|channel|>analysis<|message|>Hm.", [("thought", "Hm.")]),
    "a cut header": (f"{THOUGHT}{NEXT}<|channel|>fin", [HM]),
    "no header": ("It rains.", [("text", "It rains.")]),
    "text to a recipient": (" to be", [("text", " to be")]),
    "no channel": ("<|message|>It rains.", [("text", "It rains.")]),
    "a call in the generic form": (
        f'{FINAL}<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>',
        [PARIS],
    ),
}
MALFORMED = {
    "an unknown channel": "<|channel|>secret<|message|>It rains.",
    "no message": "<|channel|>final It rains. " + "Again. " * 100,
    "no message, and cut": "<|channel|>final It rains.",
    "another role": "<|start|>user<|message|>It rains.",
    "no name": '<|channel|>commentary to=functions. <|constrain|>json<|message|>{"a": 1}',
    "a header that is cut in the name": "<|channel|>commentary to=functions.get_wea",
    "cut arguments": IN_CHANNEL + '{"city": "Par',
    "no arguments": IN_CHANNEL,
    "arguments that are no object": IN_CHANNEL + "[1]",
    "arguments that are no JSON": IN_CHANNEL + "city=Paris",
    "code": "<|channel|>analysis to=python code<|message|>print(1)",
    "no number": IN_CHANNEL + '{"city": NaN}',
    "nested too deep": IN_CHANNEL + '{"a": ' * 3000,
}


@pytest.mark.parametrize("guaranteed", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str, *, guaranteed: bool) -> None:
    text, expected = ANSWERS[name]
    assert parts(text, HARMONY, guaranteed=guaranteed) == expected


@pytest.mark.parametrize("name", MALFORMED)
def test_unreadable_messages_are_text(name: str) -> None:
    text = MALFORMED[name]
    assert parts(text, HARMONY) == [("text", text)]
    assert parts(f"{THOUGHT}{text}", HARMONY) == [HM, ("text", text)]
    if "cut" not in name and len(text) < 200:
        behind = parts(f"{text}<|end|>{NEXT}{FINAL}So.", HARMONY)
        assert behind == [("text", f"{text}So.")]


def test_thoughts_and_content_are_streamed() -> None:
    parser = OutputParser(HARMONY, tools=TOOLS)
    assert parser.push("<|channel|>analysis<|message|>") == []
    assert parser.in_reasoning
    assert parser.push("Hm. <|e") == [ReasoningDelta("Hm.")]
    assert parser.push(f"nd|>{NEXT}<|channel|>comm") == []
    assert parser.push("entary<|message|>I look") == [TextDelta("I look", 91)]
    assert not parser.in_reasoning
    assert parser.push(f"<|end|>{NEXT}{IN_CHANNEL}{ARGUMENTS[:-1]}") == []
    assert parser.push("}") == [
        ToolCallStart(0, "get_weather"),
        ToolCallDelta(0, ARGUMENTS),
        ToolCallEnd(0),
    ]


def test_a_guaranteed_call_is_streamed() -> None:
    parser = OutputParser(HARMONY, tools=TOOLS, guaranteed=True)
    assert parser.push(IN_CHANNEL) == []
    assert parser.push('{"ci') == [ToolCallStart(0, "get_weather"), ToolCallDelta(0, '{"ci')]
    assert parser.push('ty": "Paris"}<|call|>') == [
        ToolCallDelta(0, 'ty": "Paris"}'),
        ToolCallEnd(0),
    ]
    assert parser.flush() == []


@given(st.data())
def test_nothing_is_lost(data: st.DataObject) -> None:
    words = ["a", "<|channel|>", "to=", "commentary", "<|mess", "<", " x ", "{", "é", "<|x|>"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=12)))
    text = f"{text}."
    size = data.draw(st.integers(1, 9))
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert parts_of(events_of(OutputParser(HARMONY, tools=TOOLS), pieces)) == [("text", text)]


@pytest.mark.parametrize("marker", [*TOKENS, f"{NEXT}{THOUGHT}", f"<|end|>{NEXT}{FINAL}"])
def test_constrained_content_is_text(marker: str) -> None:
    content = f'{{"a": "x{marker}y"}}'
    assert parts(f"{FINAL}{content}", HARMONY, constrained=True) == [("text", content)]


def test_arguments_are_the_models_own_text() -> None:
    form = HARMONY.tools
    assert form is not None
    named = form._replace(called="f")
    assert read_calls('{ "a":1 }', named, [])[0].arguments == '{ "a":1 }'
    assert read_calls('{"a": "b\nc"}', named, [])[0].arguments == '{"a": "b\\nc"}'
    with pytest.raises(MalformedCallError):
        read_calls("3", named, [])


# -- conversations -----------------------------------------------------------------------------

ASKS = Message(role="user", content="What is it like?")
CALL = ToolCall(id="1", name="get_weather", arguments='{"city":"Paris"}')
RAINS = Message(role="tool", content="Rain.", tool_call_id="1")
CALLED = "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
RESULT = '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"{}"<|end|>'


def talk(*messages: Message, **kwargs: Any) -> Conversation:
    return Conversation(messages=list(messages), tools=list(TOOLS), **kwargs)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("harmony")
    return model_with(folder, templates.HARMONY, TOKENS, special=True).text


def test_harmony_is_detected_by_the_template(codec: TextCodec) -> None:
    assert codec.template.form is HARMONY
    names = codec.special_tokens_by_name
    assert {names["<|return|>"], names["<|call|>"]} < codec.eos_ids
    assert names["<|end|>"] not in codec.eos_ids
    assert {names[token] for token in TOKENS[:5]} <= codec.markup_tokens
    can = codec.template.abilities
    assert can.tools
    assert template_of(templates.HARMONY).abilities.reasoning_key == "thinking"
    assert (can.arguments_as_text, can.several_calls, can.content_beside_thoughts) == (False,) * 3
    assert can.system
    assert not can.late_system


def test_a_call_and_its_thoughts_are_rendered(codec: TextCodec) -> None:
    said = Message(role="assistant", reasoning="Hm.", tool_calls=[CALL])
    text = codec.template.render(talk(ASKS, said, RAINS))
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        f'{CALLED}{{"city": "Paris"}}<|call|>{RESULT.format("Rain.")}<|start|>assistant'
    )
    said.content = "I look."
    assert "<|message|>Hm.\n\nI look.<|end|>" in codec.template.render(talk(ASKS, said, RAINS))
    said.reasoning = ""
    assert "<|message|>I look.<|end|>" in codec.template.render(talk(ASKS, said, RAINS))


def test_each_call_has_its_own_message_and_result() -> None:
    other = ToolCall(id="2", name="get_weather", arguments='{"city":"Rome"}')
    said = Message(role="assistant", reasoning="Hm.", tool_calls=[CALL, other])
    sunny = Message(role="tool", content="Sun.", tool_call_id="2")
    lost = Message(role="tool", content="Hail.", tool_call_id="9")
    template = template_of(templates.HARMONY)
    text = template.render(talk(ASKS, said, sunny, RAINS, lost))
    assert text.endswith(
        f'Hm.<|end|>{CALLED}{{"city": "Paris"}}<|call|>{RESULT.format("Rain.")}'
        f'{CALLED}{{"city": "Rome"}}<|call|>{RESULT.format("Sun.")}{RESULT.format("Hail.")}'
        "<|start|>assistant"
    )
    thinking = template_of(templates.THINKING, "json_tools")
    assert thinking.abilities.several_calls
    assert thinking.abilities.content_beside_thoughts


def test_answer_text_is_put_back(codec: TextCodec) -> None:
    for opening in ("", f"{THOUGHT}{NEXT}"):
        before = codec.template.render(talk(ASKS))
        tokens = codec.encode(f"{opening}{FINAL}It ", special_tokens=False)
        tokens += [t for c in "rains." for t in codec.encode(c, special_tokens=False)]
        answer = read_answer(codec, tokens, TOOLS, before)
        assert answer is not None
        said = Message(role="assistant", content="It rains.")
        conversation = talk(ASKS, said, ASKS)
        prompt, misses = encode_prompt(codec, conversation, {1: answer})
        text = codec._fast.decode(prompt, skip_special_tokens=False)
        assert text == codec.template.render(conversation)
        assert prompt != codec.encode(text, special_tokens=False)
        assert [miss.reason for miss in misses] == (
            ["the template drops earlier thoughts"] if opening else []
        )


@pytest.mark.parametrize(
    "text",
    [
        f"{THOUGHT}{NEXT}{IN_CHANNEL}{ARGUMENTS}",
        f"<|channel|>commentary<|message|>a<|end|>{NEXT}{FINAL}b",
        "It rains.",
        THOUGHT,
        f"{FINAL}a<|end|>",
    ],
)
def test_answers_of_several_messages_are_not_put_back(codec: TextCodec, text: str) -> None:
    tokens = codec.encode(text, special_tokens=False)
    assert read_answer(codec, tokens, TOOLS, codec.template.render(talk(ASKS))) is None


def test_a_tokenizer_without_the_markers(tmp_path: Path) -> None:
    codec = model_with(tmp_path, templates.HARMONY).text
    assert codec.template.form is HARMONY
    assert codec.eos_ids == {codec.special_tokens_by_name["<|im_end|>"]}
