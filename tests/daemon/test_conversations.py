"""Which conversation a request belongs to, by its headers and by how its prompt begins."""

import pytest

from umbel.daemon.http.failures import APIError
from umbel.daemon.identity.conversations import (
    Place,
    check_name,
    conversation_of_choice,
    named_conversation,
    place_of,
    session,
)
from umbel.models.text.conversation import Conversation, Message


def talk(*contents: str) -> Conversation:
    """Make a conversation of a system prompt and messages in turn."""
    messages = [
        Message(role="assistant" if number % 2 else "user", content=text)
        for number, text in enumerate(contents)
    ]
    return Conversation(messages=[Message(role="system", content="Be kind."), *messages])


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({}, None),
        ({"X-Claude-Code-Session-Id": "s"}, "s"),
        ({"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a"}, "s.a"),
        ({"session-id": "s", "thread-id": "t"}, "t"),
        ({"x-session-affinity": "s"}, "s"),
        ({"x-session-id": "s\x1b[2J"}, None),
        ({"x-session-id": "s" * 257}, None),
        ({"x-session-id": "s\x07", "x-session-affinity": "t"}, "t"),
    ],
)
def test_session(headers: dict[str, str], name: str | None) -> None:
    """The headers that agents send; what is no word is no session, and no error."""
    assert session(headers) == name


def test_no_client_can_name_the_conversation_of_a_second_answer() -> None:
    """A request without a conversation waits for no other, whatever its id is."""
    assert conversation_of_choice("mine", 0) == "mine"
    names = {
        conversation_of_choice(name, choice) for name in ("mine", "mine.1") for choice in (1, 2)
    }
    assert len(names) == 4
    for name in names:
        assert session({"x-session-id": name}) is None
        with pytest.raises(APIError):
            check_name(name, "conversation")


def test_a_name_that_is_given_must_be_one() -> None:
    """A client that names its conversation hears what is wrong with the name."""
    assert named_conversation({"X-Umbel-Conversation": "mine"}) == "mine"
    assert named_conversation({}) is None
    for name in ("x" * 257, "a\nb"):
        with pytest.raises(APIError) as refusal:
            check_name(name, "conversation")
        assert (refusal.value.status, refusal.value.param) == (400, "conversation")


def test_a_continued_prompt_keeps_its_conversation() -> None:
    """Later turns keep it; other first messages and other system prompts have their own."""
    first = place_of(None, "s", talk("hello"))
    assert str(first.conversation).startswith("s/")
    assert place_of(None, "s", talk("hello", "hi", "more")) == first
    other = Conversation(messages=[Message(role="user", content="hello")])
    for agent, prompt in (("s", talk("write a title")), ("t", talk("hello")), ("s", other)):
        assert place_of(None, agent, prompt).conversation != first.conversation


def test_texts_that_begin_alike_are_one_conversation() -> None:
    """A text goes on with another that it begins with; tokens do, too."""
    text, tokens = "once upon a time " * 20, list(range(300))
    for agent in ("s", None):
        assert place_of(None, agent, text) == place_of(None, agent, text + "there was")
        assert place_of(None, agent, tokens) == place_of(None, agent, [*tokens, 7])
    assert place_of(None, None, text) != place_of(None, None, "x" + text)
    assert place_of(None, None, tokens) != place_of(None, None, [7, *tokens])


def test_named_conversations_run_one_request_at_a_time() -> None:
    """The rest start in order, by session or by how they begin, and no client can name that."""
    assert place_of("mine", "s", talk("hello")) == Place("mine")
    units = {
        place_of(None, agent, talk(words)).unit
        for agent in ("s", "t")
        for words in ("hello", "write a title")
    }
    assert len(units) == 2
    begun = {place_of(None, None, talk(words)) for words in ("hello", "write a title")}
    assert {place.conversation for place in begun} == {None}
    units |= {place.unit for place in begun}
    assert len(units) == 4
    for unit in units:
        with pytest.raises(APIError):
            check_name(unit, "conversation")
