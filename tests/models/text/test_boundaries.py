"""Boundaries are found by rendering, whatever the template does with earlier turns."""

import json
from pathlib import Path
from typing import Any

import pytest

from umbel.models.loader import LoadedModel, load
from umbel.models.text.boundaries import find

from ...tiny import tiny_model_dir

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
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You are one of many agents."},
    {"role": "user", "content": "What is the plan?"},
    {"role": "assistant", "content": "<think>hm</think>To read the report."},
    {"role": "user", "content": "And then?"},
]


def model(folder: Path, template: str) -> LoadedModel:
    """Load the tiny model with another chat template."""
    path = tiny_model_dir(folder / "m")
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    return load(str(path))


def texts(loaded: LoadedModel, talk: list[dict[str, Any]]) -> tuple[str | None, list[str], str]:
    """The boundaries as text: what stands before each, and the whole prompt."""
    prompt = loaded.text.encode_chat(talk)
    found = find(loaded.text, talk, prompt)
    fast = loaded.text._fast

    def text(end: int) -> str:
        return str(fast.decode(prompt[:end], skip_special_tokens=False))

    system = None if found.system is None else text(found.system)
    return system, [text(end) for end in found.messages], text(len(prompt))


def test_template_that_keeps_everything(tmp_path: Path) -> None:
    """The next turn keeps the whole prompt, generation prompt included."""
    system, messages, whole = texts(model(tmp_path, KEEPS), TALK)
    assert system is not None
    assert system.endswith("many agents.<|im_end|>\n<|im_start|>user\n")
    assert messages[-1] == whole
    assert messages[-2].endswith("report.<|im_end|>\n")
    assert messages[-3].endswith("plan?<|im_end|>\n")


@pytest.mark.parametrize("template", [DROPS_THINKING, REWRITES_THINKING])
def test_template_that_changes_thinking(tmp_path: Path, template: str) -> None:
    """The boundary stands before what the next turn will not show again."""
    loaded = model(tmp_path, template)
    _, messages, whole = texts(loaded, TALK)
    assert whole.endswith("<|im_start|>assistant\n<think>\n")
    following = [*TALK, {"role": "assistant", "content": "We run the tests."}]
    turn = loaded.text.render_chat([*following, {"role": "user", "content": "And?"}])
    assert turn.startswith(messages[-1])
    assert "And then?<|im_end|>" in messages[-1]


def test_next_turn_resumes_at_the_boundary(tmp_path: Path) -> None:
    """For every template: the deepest boundary is a prefix of the next turn's tokens."""
    for number, template in enumerate((KEEPS, DROPS_THINKING, REWRITES_THINKING)):
        loaded = model(tmp_path / str(number), template)
        prompt = loaded.text.encode_chat(TALK)
        end = find(loaded.text, TALK, prompt).messages[-1]
        turn = [*TALK, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
        assert loaded.text.encode_chat(turn)[:end] == prompt[:end]


def test_system_boundary_is_shared(tmp_path: Path) -> None:
    """Two agents with one system prompt share exactly the tokens before the boundary."""
    loaded = model(tmp_path, KEEPS)
    other = [TALK[0], {"role": "user", "content": "Something else."}]
    ends = []
    for talk in (TALK, other):
        prompt = loaded.text.encode_chat(talk)
        ends.append(prompt[: find(loaded.text, talk, prompt).system])
    assert ends[0] == ends[1]
    assert len(ends[0]) > 10


def test_refused_renderings_give_no_boundary(tmp_path: Path) -> None:
    """A template that refuses a made-up rendering does not fail the request."""
    loaded = model(tmp_path, ALTERNATES)
    prompt = loaded.text.encode_chat(TALK)
    found = find(loaded.text, TALK, prompt)
    assert found.messages
    assert all(0 < end <= len(prompt) for end in found.messages)


def test_no_system_prompt(tmp_path: Path) -> None:
    """Without one, at most the template's own opening is shared."""
    loaded = model(tmp_path, KEEPS)
    talk = [{"role": "user", "content": "Hello"}]
    prompt = loaded.text.encode_chat(talk)
    system = find(loaded.text, talk, prompt).system
    assert system is None or system < 4
