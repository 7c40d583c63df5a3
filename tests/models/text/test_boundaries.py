"""Boundaries are found by rendering, whatever the template does with earlier turns."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from umbel.models.load.loader import LoadedModel
from umbel.models.text.boundaries import MAX_HINTS, find
from umbel.models.text.conversation import CacheHint, Conversation, Message, Tool, ToolCall

from .outputs import TOOLS
from .templates import MARKERS, OBJECTS, THINKING, model_with

KEEPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last or m.role != 'assistant' %}{{ m.content }}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
REWRITES_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if m.role == 'user' and not loop.last and not loop.first "
    "and messages[loop.index0 - 1].role == 'user' %}{{ raise_exception('no') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK = [
    Message(role="system", content="You are one of many agents."),
    Message(role="user", content="What is the plan?"),
    Message(role="assistant", content="<think>hm</think>To read the report."),
    Message(role="user", content="And then?"),
]


def talk_of(*messages: Message, tools: Sequence[Tool] = ()) -> Conversation:
    return Conversation(messages=list(messages), tools=list(tools))


def texts(loaded: LoadedModel, talk: Conversation) -> tuple[str | None, list[str], str]:
    encode = loaded.text.encode_conversation
    prompt = encode(talk)
    found = find(encode, talk, prompt)
    fast = loaded.text._fast

    def text(end: int) -> str:
        return str(fast.decode(prompt[:end], skip_special_tokens=False))

    system = None if found.system is None else text(found.system)
    return system, [text(end) for end in found.messages], text(len(prompt))


def test_template_that_keeps_everything(tmp_path: Path) -> None:
    system, messages, whole = texts(model_with(tmp_path, KEEPS), talk_of(*TALK))
    assert system is not None
    assert system.endswith("many agents.<|im_end|>\n<|im_start|>user\n")
    assert messages[-1] == whole
    assert messages[-2].endswith("report.<|im_end|>\n")
    assert messages[-3].endswith("plan?<|im_end|>\n")


@pytest.mark.parametrize("template", [DROPS_THINKING, REWRITES_THINKING])
def test_template_that_changes_thinking(tmp_path: Path, template: str) -> None:
    loaded = model_with(tmp_path, template)
    _, messages, whole = texts(loaded, talk_of(*TALK))
    assert whole.endswith("<|im_start|>assistant\n<think>\n")
    answer = Message(role="assistant", content="We run the tests.")
    question = Message(role="user", content="And?")
    turn = loaded.text.template.render(talk_of(*TALK, answer, question))
    assert turn.startswith(messages[-1])
    assert "And then?<|im_end|>" in messages[-1]


def test_next_turn_resumes_at_the_boundary(tmp_path: Path) -> None:
    for number, template in enumerate((KEEPS, DROPS_THINKING, REWRITES_THINKING)):
        loaded = model_with(tmp_path / str(number), template)
        encode = loaded.text.encode_conversation
        prompt = encode(talk_of(*TALK))
        end = find(encode, talk_of(*TALK), prompt).messages[-1]
        answer, question = Message(role="assistant", content="x"), Message(role="user", content="y")
        assert encode(talk_of(*TALK, answer, question))[:end] == prompt[:end]


def test_system_boundary_is_shared(tmp_path: Path) -> None:
    loaded = model_with(tmp_path, KEEPS)
    other = [TALK[0], Message(role="user", content="Something else.")]
    ends = []
    for talk in (talk_of(*TALK), talk_of(*other)):
        prompt = loaded.text.encode_conversation(talk)
        ends.append(prompt[: find(loaded.text.encode_conversation, talk, prompt).system])
    assert ends[0] == ends[1]
    assert len(ends[0]) > 10


def test_refused_renderings_give_no_boundary(tmp_path: Path) -> None:
    loaded = model_with(tmp_path, ALTERNATES)
    encode = loaded.text.encode_conversation
    prompt = encode(talk_of(*TALK))
    found = find(encode, talk_of(*TALK), prompt)
    assert found.messages
    assert all(0 < end <= len(prompt) for end in found.messages)


def test_no_system_prompt(tmp_path: Path) -> None:
    loaded = model_with(tmp_path, KEEPS)
    talk = talk_of(Message(role="user", content="Hello"))
    prompt = loaded.text.encode_conversation(talk)
    system = find(loaded.text.encode_conversation, talk, prompt).system
    assert system is None or system < 4


def test_tools_belong_to_the_system_boundary(tmp_path: Path) -> None:
    loaded = model_with(tmp_path, KEEPS)
    for messages in (TALK, TALK[1:]):
        system, _, _ = texts(loaded, talk_of(*messages, tools=TOOLS))
        assert system is not None
        assert system.endswith("answer without.<|im_end|>\n<|im_start|>user\n")
        assert "get_weather" in system


def test_a_tool_loop_resumes_at_the_boundary(tmp_path: Path) -> None:
    loaded = model_with(tmp_path, THINKING, MARKERS)
    assert loaded.text.template.abilities.tools
    call = ToolCall(id="1", name="get_weather", arguments="{}")
    messages = [
        *TALK,
        Message(role="assistant", reasoning="Rainy?", tool_calls=[call]),
        Message(role="tool", content="Rain.", tool_call_id="1"),
    ]
    _, ends, whole = texts(loaded, talk_of(*messages, tools=TOOLS))
    assert whole.endswith("<|im_start|>assistant\n<think>\n")
    assert ends[-1] + "<think>\n" == whole
    assert "Rainy?" in ends[-1]


class TestHints:
    def parts(
        self, loaded: LoadedModel, talk: Conversation, *hints: CacheHint
    ) -> tuple[list[str], int]:
        """Return the text before each hint, and the count of renderings for the hints."""
        count = 0

        def encode(conversation: Conversation, *, generation_prompt: bool = True) -> Sequence[int]:
            nonlocal count
            count += 1
            return loaded.text.encode_conversation(
                conversation, generation_prompt=generation_prompt
            )

        prompt = encode(talk)
        find(encode, talk, prompt)
        plain, count = count - 1, 0
        found = find(encode, msgspec.structs.replace(talk, hints=list(hints)), prompt)
        decode = loaded.text._fast.decode
        return [
            str(decode(prompt[:end], skip_special_tokens=False)) for end in found.hints
        ], count - plain

    def test_inside_a_system_prompt(self, tmp_path: Path) -> None:
        loaded = model_with(tmp_path, KEEPS)
        stable, hint = "You are one of many agents.", CacheHint(0, 27)
        talks = [
            talk_of(Message(role="system", content=f"{stable}\n{day}"), *TALK[1:])
            for day in ("It is Monday.", "1 day is left.")
        ]
        for talk in talks:
            assert self.parts(loaded, talk, hint) == ([f"<|im_start|>system\n{stable}"], 1)

    def test_hints_inside_the_history(self, tmp_path: Path) -> None:
        loaded = model_with(tmp_path, KEEPS)
        talk = talk_of(*TALK, *TALK[2:])
        inside, behind = CacheHint(1, len("What is")), CacheHint(1, len(TALK[1].content))
        (first, second), taken = self.parts(loaded, talk, inside, behind)
        assert taken == 2
        assert first.endswith("user\nWhat is")
        assert second.endswith("plan?<|im_end|>\n<|im_start|>")
        (third,), taken = self.parts(loaded, talk, CacheHint(3, len(TALK[3].content)))
        assert taken == 0
        assert third.endswith("And then?<|im_end|>\n")

    def test_hint_at_a_known_boundary_takes_no_rendering(self, tmp_path: Path) -> None:
        loaded = model_with(tmp_path, KEEPS)
        ends = [CacheHint(i, len(TALK[i].content)) for i in (0, 3)]
        assert self.parts(loaded, talk_of(*TALK), *ends) == ([], 0)
        tools = CacheHint(None, len(TOOLS))
        assert self.parts(loaded, talk_of(*TALK[1:], tools=TOOLS), tools) == ([], 0)

    def test_count_of_hints_is_bounded(self, tmp_path: Path) -> None:
        loaded = model_with(tmp_path, KEEPS)
        hints = [CacheHint(0, end) for end in range(4, 27)]
        found, taken = self.parts(loaded, talk_of(*TALK), *hints)
        assert taken == MAX_HINTS
        assert len(found) <= MAX_HINTS

    def test_hint_before_dropped_thoughts(self, tmp_path: Path) -> None:
        loaded = model_with(tmp_path, THINKING, MARKERS)
        call = ToolCall(id="1", name="get_weather", arguments="{}")
        talk = talk_of(
            *TALK[:2],
            Message(role="assistant", reasoning="Rainy?", tool_calls=[call]),
            Message(role="tool", content="Rain, and more rain.", tool_call_id="1"),
            Message(role="assistant", content="It rains."),
            Message(role="user", content="And then?"),
            *TALK[2:],
            tools=TOOLS,
        )
        (found,), taken = self.parts(loaded, talk, CacheHint(3, len("Rain,")))
        assert taken == 1
        assert found.endswith("<tool_response>\nRain,")
        assert "Rainy?" not in found

    def test_tools_before_the_system_prompt(self, tmp_path: Path) -> None:
        loaded = model_with(tmp_path, OBJECTS, MARKERS)
        assert loaded.text.template.abilities.tools
        talk = talk_of(*TALK, tools=TOOLS)
        (first, every), taken = self.parts(
            loaded, talk, CacheHint(None, 1), CacheHint(None, len(TOOLS))
        )
        assert taken == 2
        assert TOOLS[0].name in first
        assert TOOLS[1].name not in first
        assert every.endswith("[system]")
        assert TOOLS[-1].name in every

    def test_tools_behind_the_system_prompt(self, tmp_path: Path) -> None:
        loaded = model_with(tmp_path, THINKING, MARKERS)
        talk = talk_of(*TALK, tools=TOOLS)
        (found,), _ = self.parts(loaded, talk, CacheHint(None, len(TOOLS)))
        assert found == "<|im_start|>system\n"
