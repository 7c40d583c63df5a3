"""Earlier answers stand in a prompt as they were generated, where the template allows it."""

import json
from pathlib import Path
from typing import Any

import pytest

from umbel.models.load.loader import LoadedModel, load
from umbel.models.text.boundaries import find
from umbel.models.text.codec import TextCodec
from umbel.models.text.conversation import Conversation, Message, ToolCall
from umbel.models.text.history import Answer, AnswerStore, Lineage, encode_prompt, read_answer

from ...sentencepiece import sentencepiece_model_dir
from .outputs import TOOLS
from .templates import MARKERS, THINKING, model_with

ASKS = Message(role="user", content="What is it like in Paris?")
RAINS = Message(role="tool", content="Rain.", tool_call_id="call_1")
CALL = '<tool_call>\n{ "name": "get_weather",  "arguments": {"city":  "Paris"} }\n</tool_call>'
SENT = ToolCall(id="call_1", name="get_weather", arguments='{"city":  "Paris"}')


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return model_with(tmp_path_factory.mktemp("thinker"), THINKING, MARKERS).text


def talk(*messages: Message, **kwargs: Any) -> Conversation:
    return Conversation(messages=list(messages), tools=list(TOOLS), **kwargs)


def letters(codec: TextCodec, text: str) -> list[int]:
    """Encode a text letter by letter, as no tokenizer would; markers stay whole."""
    tokens: list[int] = []
    while text:
        marker = next((m for m in MARKERS if text.startswith(m)), None)
        known = marker is not None and len(codec.encode(marker, special_tokens=False)) == 1
        piece = marker if known and marker else text[0]
        tokens += codec.encode(piece, special_tokens=False)
        text = text.removeprefix(piece)
    return tokens


def remember(codec: TextCodec, conversation: Conversation, text: str) -> Answer:
    prompt = codec.template.render(conversation)
    answer = read_answer(codec, letters(codec, text), conversation.tools, prompt)
    assert answer is not None
    return answer


def test_a_plain_answer_is_put_back(smollm2: LoadedModel) -> None:
    codec = smollm2.text
    first = talk(ASKS)
    answer = remember(codec, first, "It is raining there.")
    said = Message(role="assistant", content="It is raining there.")
    prompt, misses = encode_prompt(codec, talk(ASKS, said, ASKS), {1: answer})
    before = codec.encode_conversation(first)
    assert prompt[: len(before) + len(answer.tokens)] == [*before, *answer.tokens]
    assert misses == []
    own = codec.encode_conversation(talk(ASKS, said, ASKS))
    assert own != prompt
    assert codec._fast.decode(own) == codec._fast.decode(prompt)


def test_a_call_is_put_back_with_its_own_spelling(smollm2: LoadedModel) -> None:
    codec = smollm2.text
    first = talk(ASKS)
    answer = remember(codec, first, f"Let me look. \n{CALL}")
    spelled = ToolCall(id="call_1", name="get_weather", arguments='{"city":"Paris"}')
    said = Message(role="assistant", content="Let me look.", tool_calls=[spelled])
    prompt, misses = encode_prompt(codec, talk(ASKS, said, RAINS), {1: answer})
    before = codec.encode_conversation(first)
    assert prompt[: len(before) + len(answer.tokens)] == [*before, *answer.tokens]
    assert misses == []


def test_a_tokenizer_that_writes_a_blank_before_each_text(tmp_path: Path) -> None:
    codec = load(str(sentencepiece_model_dir(tmp_path / "m"))).text
    assert not codec.encodes_apart
    first, words = talk(ASKS), "Paris is nearer."
    tokens = codec.encode_pieces(["", words])[1]
    answer = read_answer(codec, tokens, first.tools, codec.template.render(first))
    assert answer is not None
    said = Message(role="assistant", content=words)
    prompt, misses = encode_prompt(codec, talk(ASKS, said, ASKS), {1: answer})
    before = codec.encode_conversation(first)
    assert prompt[: len(before) + len(tokens)] == [*before, *tokens]
    assert misses == []
    own = codec.encode_conversation(talk(ASKS, said, ASKS))
    assert codec._fast.decode(own) == codec._fast.decode(prompt)


def test_thoughts_of_a_tool_loop_are_put_back(thinker: TextCodec) -> None:
    """Although clients do not send them back: the template keeps them until the turn is over."""
    first = talk(ASKS)
    answer = remember(thinker, first, f"Rainy?\n</think>\n\n{CALL}")
    assert answer.opening == "<think>\n"
    said = Message(role="assistant", tool_calls=[SENT])
    prompt, misses = encode_prompt(thinker, talk(ASKS, said, RAINS), {1: answer})
    before = thinker.encode_conversation(first)
    assert prompt[: len(before) + len(answer.tokens)] == [*before, *answer.tokens]
    assert misses == []


def test_dropped_thoughts_leave_the_content(thinker: TextCodec) -> None:
    answer = remember(thinker, talk(ASKS), "Rainy?\n</think>\n\nIt is raining.")
    said = Message(role="assistant", content="It is raining.")
    conversation = talk(ASKS, said, ASKS)
    prompt, misses = encode_prompt(thinker, conversation, {1: answer})
    assert [miss.message for miss in misses] == [1]
    assert "drops earlier thoughts" in misses[0].reason
    text = thinker._fast.decode(prompt, skip_special_tokens=False)
    assert text == thinker.template.render(conversation)
    assert list(answer.tail) == letters(thinker, "It is raining.")
    places = range(len(prompt) - len(answer.tail))
    assert any(prompt[i : i + len(answer.tail)] == list(answer.tail) for i in places)


def test_an_empty_block_of_thoughts_that_is_not_repeated(thinker: TextCodec) -> None:
    options = {"enable_thinking": False}
    answer = remember(thinker, talk(ASKS, options=options), "It is raining.")
    said = Message(role="assistant", content="It is raining.")
    conversation = talk(ASKS, said, ASKS, options=options)
    prompt, misses = encode_prompt(thinker, conversation, {1: answer})
    assert [miss.message for miss in misses] == [1]
    text = thinker._fast.decode(prompt, skip_special_tokens=False)
    assert text == thinker.template.render(conversation)


@pytest.mark.parametrize(
    "said",
    [
        Message(role="assistant", content="Let me see.", tool_calls=[SENT]),
        Message(role="assistant", content="Let me look."),
        Message(
            role="assistant",
            content="Let me look.",
            tool_calls=[ToolCall(id="call_1", name="get_weather", arguments='{"city": "Rome"}')],
        ),
        Message(
            role="assistant",
            content="Let me look.",
            tool_calls=[ToolCall(id="call_1", name="get_time", arguments='{"city": "Paris"}')],
        ),
        Message(role="user", content="Let me look.", tool_calls=[SENT]),
    ],
)
def test_answer_changed_by_the_client_is_not_put_back(smollm2: LoadedModel, said: Message) -> None:
    codec = smollm2.text
    answer = remember(codec, talk(ASKS), f"Let me look. {CALL}")
    conversation = talk(ASKS, said, RAINS)
    prompt, misses = encode_prompt(codec, conversation, {1: answer})
    assert prompt == codec.encode_conversation(conversation)
    assert misses == [(1, "the client changed it")]


def test_thoughts_changed_by_the_client_are_not_put_back(thinker: TextCodec) -> None:
    answer = remember(thinker, talk(ASKS), f"Rainy?\n</think>\n\n{CALL}")
    for reasoning, misses in (("Rainy?\n", []), ("Sunny?", [(1, "the client changed it")])):
        said = Message(role="assistant", reasoning=reasoning, tool_calls=[SENT])
        conversation = talk(ASKS, said, RAINS)
        prompt = encode_prompt(thinker, conversation, {1: answer})
        assert prompt.misses == misses
        assert reasoning.strip() in thinker._fast.decode(prompt.tokens, skip_special_tokens=False)


def test_a_template_without_place_for_an_answer(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content | upper }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    codec = model_with(tmp_path, template).text
    answer = remember(codec, talk(ASKS), "Rain.")
    conversation = talk(ASKS, Message(role="assistant", content="Rain."), ASKS)
    prompt, misses = encode_prompt(codec, conversation, {1: answer})
    assert prompt == codec.encode_conversation(conversation)
    assert misses == [(1, "the template does not show it")]


@pytest.mark.parametrize(
    "text", ["Rainy?", "Rainy?\n</think>\n\nYes <|im_start|>user", "\n</think>\n\n世"]
)
def test_answers_that_cannot_be_put_back(thinker: TextCodec, text: str) -> None:
    prompt = thinker.template.render(talk(ASKS))
    tokens = thinker.encode(text, special_tokens=False)
    if text.endswith("世"):
        tokens = [*tokens[:-1], *(thinker._fast.token_to_id(letter) for letter in ("ä", "\u00b8"))]
    assert read_answer(thinker, tokens, TOOLS, prompt) is None


@pytest.mark.parametrize("name", ["smollm2", "thinker"])
def test_a_tool_loop_of_twenty_turns(name: str, request: pytest.FixtureRequest) -> None:
    codec: TextCodec = request.getfixturevalue(name)
    codec = codec.text if isinstance(codec, LoadedModel) else codec
    store = AnswerStore(2**20)
    messages = [Message(role="system", content="You are brief."), ASKS]
    known: list[int] = []
    for turn in range(20):
        conversation = talk(*messages)
        found = store.find("a", messages)
        assert len(found) == turn
        prompt, misses = encode_prompt(codec, conversation, found)
        assert misses == []
        assert prompt[: len(known)] == known
        text = codec.template.render(conversation)
        thoughts = f"Day {turn}?\n</think>\n\n" if codec.template.opens_reasoning(text) else ""
        body = json.dumps({"name": "get_weather", "arguments": {"days": turn}}, indent=1)
        tokens = letters(codec, f"{thoughts}<tool_call>\n{body}\n</tool_call>")
        answer = read_answer(codec, tokens, TOOLS, text)
        assert answer is not None
        call = ToolCall(id=f"call_{turn}", name="get_weather", arguments=f'{{"days":{turn}}}')
        said = Message(role="assistant", tool_calls=[call])
        store.put("a", Lineage(messages).key(said), answer)
        messages += [said, Message(role="tool", content="Rain.", tool_call_id=call.id)]
        known = [*prompt, *tokens]


def test_boundaries_of_a_prompt_with_answers_put_back(thinker: TextCodec) -> None:
    answer = remember(thinker, talk(ASKS), f"Rainy?\n</think>\n\n{CALL}")
    said = Message(role="assistant", tool_calls=[SENT])

    def encode(conversation: Conversation, *, generation_prompt: bool = True) -> list[int]:
        return encode_prompt(
            thinker, conversation, {1: answer}, generation_prompt=generation_prompt
        ).tokens

    prompt = encode(talk(ASKS, said, RAINS))
    found = find(encode, talk(ASKS, said, RAINS), prompt)
    end = thinker.encode("<|im_start|>assistant\n<think>\n", special_tokens=False)
    kept = len(prompt) - len(thinker.encode("<think>\n", special_tokens=False))
    assert prompt[-len(end) :] == end
    assert found.messages[-1] == kept


def test_answers_are_kept_by_tenant_within_a_budget() -> None:
    answer = Answer((1,) * 100, "", thought=False, reasoning="", tail=(), content="", calls=())
    said = [
        Message(role="assistant", tool_calls=[ToolCall(id=i, name="f", arguments="{}")])
        for i in "abcd"
    ]
    store = AnswerStore(3 * answer.nbytes)
    for message in said[:3]:
        store.put("x", Lineage().key(message), answer)
    assert store.nbytes == 3 * answer.nbytes
    assert store.find("y", said) == {}
    assert set(store.find("x", said[:1])) == {0}
    store.put("x", Lineage().key(said[3]), answer)
    assert set(store.find("x", said)) == {0, 2, 3}
    store.put("x", Lineage().key(said[3]), answer)
    assert store.nbytes == 3 * answer.nbytes
    store.put("x", "large", answer._replace(tokens=(1,) * 10_000))
    assert store.nbytes == 0


def test_equal_answers_differ_by_the_messages_before_them() -> None:
    said = Message(role="assistant", content="Yes.")
    assert Lineage([ASKS]).key(said) != Lineage([RAINS]).key(said)
    assert Lineage([RAINS, ASKS]).key(said) != Lineage([ASKS]).key(said)
    again = Message(role="assistant", content="Yes. ")
    assert Lineage([ASKS]).key(said) == Lineage([ASKS]).key(again)
