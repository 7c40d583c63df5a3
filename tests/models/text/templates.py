"""Chat templates in the manner of models that cannot be had here, rendered as transformers does."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer

from umbel.models.errors import TemplateError
from umbel.models.load.loader import LoadedModel, load
from umbel.models.text.formats import HARMONY as HARMONY_FORMAT
from umbel.models.text.harmony import is_harmony
from umbel.models.text.template import ChatTemplate

from ...tiny import tiny_model_dir
from .outputs import GENERIC, format_of

_END = "{% if add_generation_prompt %}[assistant]{% endif %}"

THINKING = """\
{%- if tools or messages[0].role == 'system' %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>{% endif %}<|im_end|>
{% endif -%}
{%- set ns = namespace(query=0) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.query %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content.lstrip('\n') }}
{%- for one in m.tool_calls or [] %}{% set tool_call = one.function %}
{%- if m.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {% if tool_call.arguments is string -%}
{{ tool_call.arguments }}{% else %}{{ tool_call.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""
"""As Qwen3's: tools, thoughts of the turn that is not over, an opened block at the end."""

OBJECTS = (
    """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}{% endfor %}"""
    + _END
)
"""As Qwen3-Coder's: a call's arguments must be an object."""

NINE_LETTER_IDS = (
    """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- if m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif -%}
[id={{ m.tool_call_id }}]{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif -%}
[id={{ call.id }}]<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}"""
    + _END
)
"""As Mistral's: other ids are refused."""

OPEN_CALLS = (
    """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"""
    + _END
)
"""As Mistral's newer ones: nothing ends a call but the answer's end."""

HARMONY = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if first or tools -%}
<|start|>developer<|message|>{{ first }}
{%- for tool in tools or [] %}
type {{ tool.function.name }} = (_: {{ tool.function.parameters | tojson }}) => any;
{%- endfor %}<|end|>{% endif %}
{%- set ns = namespace(called=none, over=-1) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.over = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'tool' %}
{%- if not ns.called %}{{ raise_exception('a result without a call') }}{% endif -%}
<|start|>functions.{{ ns.called }} to=assistant<|channel|>commentary<|message|>
{{- m.content | tojson }}<|end|>
{%- elif m.role == 'assistant' and m.tool_calls %}{% set call = m.tool_calls[0].function %}
{%- if m.content and m.thinking %}{{ raise_exception('both thoughts and content') }}{% endif %}
{%- set thought = m.content or m.thinking %}
{%- if thought and loop.index0 > ns.over -%}
<|start|>assistant<|channel|>analysis<|message|>{{ thought }}<|end|>{% endif -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- set ns.called = call.name %}
{%- elif m.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- set ns.called = none %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""As gpt-oss's: one call a message, and thoughts beside calls only."""

ALTERNATING = (
    """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}
{%- if not loop.first and messages[loop.index0 - 1].role == m.role %}
{{- raise_exception('roles must alternate') }}{% endif -%}
[{{ m.role }}]{{ m.content }}{% endfor %}"""
    + _END
)
"""As Llama 2's: one system message, then the user and the assistant in turns."""

NO_SYSTEM = (
    """\
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
"""
    + ALTERNATING
)
"""As Gemma's."""


MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of their own in a model that thinks and calls, and not special ones."""


def model_with(
    folder: Path, template: str, tokens: Sequence[str] = (), *, special: bool = False
) -> LoadedModel:
    path = tiny_model_dir(folder / "m")
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    added = [AddedToken(token, special=special, normalized=False) for token in tokens]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    tokenizer.save(str(path / "tokenizer.json"))
    return load(str(path))


def _raise(message: str) -> None:
    raise ValueError(message)


def template_of(source: str, form: str | None = None) -> ChatTemplate:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    compiled = environment.from_string(source)

    def render(
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation_prompt: bool = True,
        options: Mapping[str, Any] = {},
    ) -> str:
        try:
            return compiled.render(
                messages=messages, tools=tools, add_generation_prompt=generation_prompt, **options
            )
        except Exception as error:
            raise TemplateError(str(error)) from error

    if is_harmony(source):
        return ChatTemplate(render, HARMONY_FORMAT)
    return ChatTemplate(render, GENERIC if form is None else format_of(form))
