"""The grammar of an answer, from its request and the way its model writes."""

import operator
from typing import TYPE_CHECKING, Any

import pytest

from umbel.daemon.requests.answer_grammar import conversation_grammar, text_grammar
from umbel.models.params import Grammar
from umbel.models.text.conversation import Conversation, JSONObject, Message, Tool, ToolChoice
from umbel.models.text.grammar.compiler import GrammarCompiler
from umbel.models.text.harmony import TOKENS
from umbel.models.text.output import OutputParser

from ..models.text import templates
from ..models.text.outputs import events_of, parts_of
from ..models.text.templates import model_with, template_of
from ..models.text.walks import follow

if TYPE_CHECKING:
    from umbel.models.text.codec import TextCodec

LOOK = Tool(
    name="look",
    parameters={
        "type": "object",
        "properties": {"where": {"type": "string"}},
        "required": ["where"],
    },
)
REQUIRED = ToolChoice(mode="required")
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
IN_HARMONY = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
HERE = '{"where": "here"}'
IN_TAGS = "<function=look>\n<parameter=where>\nhere\n</parameter>\n</function>"


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> "TextCodec":
    """Load a model that writes harmony."""
    folder = tmp_path_factory.mktemp("held")
    return model_with(folder, templates.HARMONY, TOKENS, special=True).text


@pytest.mark.parametrize(
    ("source", "own", "constraint", "choice", "text"),
    [
        (templates.HARMONY, None, None, REQUIRED, f"{THOUGHT}{IN_HARMONY}{HERE}"),
        (templates.HARMONY, None, JSONObject(), ToolChoice(), f"{THOUGHT}{IN_HARMONY}{HERE}"),
        (templates.OBJECTS, "qwen3_coder", None, REQUIRED, f"<tool_call>\n{IN_TAGS}\n</tool_call>"),
        (
            templates.THINKING,
            "json_tools",
            None,
            REQUIRED,
            f'<tool_call>\n{{"name": "look", "arguments": {HERE}}}\n</tool_call>',
        ),
    ],
    ids=["harmony", "harmony or JSON", "qwen3_coder", "json_tools"],
)
def test_a_call_has_the_models_own_form(
    codec: "TextCodec", source: str, own: str | None, constraint: Any, choice: ToolChoice, text: str
) -> None:
    """And what is held to it is read as a call."""
    template = template_of(source, own)
    talk = Conversation(
        messages=[Message(role="user", content="Look!")], tools=[LOOK], tool_choice=choice
    )
    held = conversation_grammar(
        GrammarCompiler(codec), template, talk, constraint, "t", opened=False
    )
    assert held.grammar is not None
    assert held.guaranteed
    assert follow(codec, held.grammar, text) in ("complete", "may end")
    assert follow(codec, held.grammar, "Hello") == "not allowed"
    parser = OutputParser(template.form, tools=[LOOK], tool_choice=choice, guaranteed=True)
    assert parts_of(events_of(parser, text))[-1] == ("call", "look", {"where": "here"})


def test_content_in_harmony_has_its_header(codec: "TextCodec") -> None:
    """The grammar constrains the channel `final`, behind free thoughts."""
    talk = Conversation(messages=[Message(role="user", content="Look!")])
    held = conversation_grammar(
        GrammarCompiler(codec), codec.template, talk, JSONObject(), "t", opened=False
    )
    assert held.grammar is not None
    assert not held.guaranteed
    texts = {
        f"{THOUGHT}<|channel|>final<|message|>{HERE}": "complete",
        f"<|channel|>final<|message|>{HERE}": "complete",
        HERE: "not allowed",
    }
    assert {text: follow(codec, held.grammar, text) for text in texts} == texts


def test_grammars_are_not_shared_between_tenants(codec: "TextCodec") -> None:
    """The time that a schema takes tells nothing of what other tenants have used."""
    compiler, schema = GrammarCompiler(codec), JSONObject()
    talk = Conversation(messages=[Message(role="user", content="Look!")])

    def compiled(tenant: str) -> list[Grammar | None]:
        held = conversation_grammar(compiler, codec.template, talk, schema, tenant, opened=False)
        return [held.grammar, text_grammar(compiler, schema, tenant)]

    first = compiled("a")
    assert all(map(operator.is_, compiled("a"), first))
    assert not any(map(operator.is_, compiled("b"), first))
