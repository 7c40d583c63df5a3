"""Earlier answers in prompts, as their clients got them."""

from umbel.daemon.requests.answer_reader import CollectedAnswer
from umbel.daemon.requests.prompts import Author, History
from umbel.models.load.loader import LoadedModel
from umbel.models.text.conversation import Conversation, Message, Tool
from umbel.models.text.history import Lineage

ASKS = Message(role="user", content="What is it like in Paris?")
LOOK = Tool(name="look", parameters={"type": "object", "properties": {}})


def test_text_that_says_a_call_is_put_back_as_it_was_generated(smollm2: LoadedModel) -> None:
    """It was held to something beside the tools, and reached its client as text."""
    codec, text = smollm2.text, 'So: <tool_call>{"name": "look", "arguments": {}}</tool_call>'
    history, first = History(codec), Conversation(messages=[ASKS], tools=[LOOK])
    rendered = codec.template.render(first)
    tokens = [token for letter in text for token in codec.encode(letter, special_tokens=False)]
    got = CollectedAnswer(text=text)
    history.remember("me", Lineage([ASKS]), [LOOK], rendered, tokens, got)
    said = Message(role="assistant", content=text)
    following = Conversation(messages=[ASKS, said, ASKS], tools=[LOOK])
    prompt, _ = history.encode(following, codec.template.render(following), Author("me", "req-1"))
    before = codec.encode(rendered, special_tokens=False)
    assert prompt[: len(before) + len(tokens)] == [*before, *tokens]
