"""Zed, as its source says that it asks and reads: its settings, a tool, thinking, errors."""

import re
from typing import Any

import pytest

from umbel.daemon.http.failures import APIError
from umbel.daemon.protocols.openai_answers import ChatAnswers
from umbel.daemon.requests.answer_reader import Delta
from umbel.daemon.requests.generation import Generations
from umbel.models.text.events import ReasoningDelta, TextDelta

from ..daemon.running import RunningDaemon, eventually
from .recipes import PAGE, recipe
from .scripted import RESULT, call, plan
from .zed import RejectionError, StreamError, Zed, assistant, content, read, result

SYSTEM = {"role": "system", "content": "You are Zed's agent. " * 20}
# Zed rewrites schemas: no `additionalProperties`, and `nullable` for what may be null.
READ_FILE = {
    "name": "read_file",
    "description": "Reads a file of the project.",
    "parameters": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Where it is."},
            "start_line": {"type": "integer", "nullable": True},
            "mode": {"anyOf": [{"type": "string"}, {"type": "number"}]},
        },
        "required": ["path"],
    },
}
REWRITE = {
    "name": "rewrite_section",
    "description": "Replaces the selected text.",
    "parameters": {
        "type": "object",
        "properties": {"replacement_text": {"type": "string", "default": ""}},
    },
}
REFUSE = {
    "name": "failure_message",
    "description": "Says why the text cannot be replaced.",
    "parameters": {"type": "object", "properties": {"message": {"type": "string", "default": ""}}},
}


def user(*texts: str) -> dict[str, Any]:
    """Write a user's message."""
    return {"role": "user", "content": content(*texts)}


def zed(daemon: RunningDaemon) -> Zed:
    """Make a Zed with the settings of the recipe."""
    return Zed(recipe("Zed", "json", daemon))


def encoder() -> ChatAnswers:
    """Make an encoder of an answer."""
    return ChatAnswers("req-1", Generations([]), "m", "f", usage=True)


def test_the_key_is_looked_for_under_the_name_of_the_provider(
    scripted_daemon: RunningDaemon,
) -> None:
    """It is the provider's name in capitals; umbel's own variables begin otherwise."""
    section = PAGE.partition("\n## Zed\n")[2].partition("\n## ")[0]
    (name,) = re.findall(r"^export (\w+)=", section, re.MULTILINE)
    (provider,) = zed(scripted_daemon).providers
    assert name == f"{provider.upper().replace('-', '_')}_API_KEY"
    assert not name.startswith("UMBEL_")


@pytest.mark.parametrize("returned", [("21 degrees",), ("21", " degrees"), ()])
def test_a_tool_and_its_result(scripted_daemon: RunningDaemon, returned: tuple[str, ...]) -> None:
    """The agent reads a file and answers; the second request finds all of the first cached."""
    editor = zed(scripted_daemon)
    task = plan(["I look.", call("read_file", path="a/Łódź.md")], f"It says: {RESULT}.")
    messages = [SYSTEM, user("Some context.", task)]
    first = editor.ask(scripted_daemon, editor.body(messages, [READ_FILE], thread="thread-1"))
    assert (first.text.strip(), first.stop) == ("I look.", "calls")
    (called,) = first.calls
    assert (called["name"], called["arguments"]) == ("read_file", {"path": "a/Łódź.md"})
    messages += [assistant(first, interleaved=True), result(called, *returned)]
    second = editor.ask(scripted_daemon, editor.body(messages, [READ_FILE], thread="thread-1"))
    assert (second.text, second.stop) == (f"It says: {''.join(returned)}.", "end of turn")
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= first.usage.prompt_tokens + first.usage.completion_tokens - 1
    eventually(lambda: scripted_daemon.log().count("conversation=thread-1/") >= 2)


@pytest.mark.parametrize(
    ("tools", "arguments"),
    [([REWRITE, REFUSE], {"replacement_text": "x = 1\n"}), ([READ_FILE], {"path": "b"})],
    ids=["the inline assistant's", "with a schema that Zed rewrote"],
)
def test_a_call_that_must_be_made(
    scripted_daemon: RunningDaemon, tools: list[dict[str, Any]], arguments: dict[str, str]
) -> None:
    """A grammar is made of what Zed sends as a schema, and the call comes."""
    editor = zed(scripted_daemon)
    task = plan(call(tools[0]["name"], **arguments))
    answer = editor.ask(scripted_daemon, editor.body([user(task)], tools, "required"))
    (called,) = answer.calls
    assert (called["name"], called["arguments"]) == (tools[0]["name"], arguments)


def test_an_answer_that_is_too_long(scripted_daemon: RunningDaemon) -> None:
    """It ends where the settings say, and Zed hears that it was cut."""
    editor = zed(scripted_daemon)
    editor.model.max_output_tokens = 3
    answer = editor.ask(scripted_daemon, editor.body([SYSTEM, user(plan("one two three four"))]))
    assert answer.stop == "most tokens"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize(("words", "too_large"), [("hello " * 70_000, True), ("hello", False)])
def test_refusals(scripted_daemon: RunningDaemon, words: str, *, too_large: bool) -> None:
    """Zed tells a prompt that is too long from everything else that is wrong."""
    editor = zed(scripted_daemon)
    body = editor.body([user(words)]) | ({} if too_large else {"temperature": 9})
    with pytest.raises(RejectionError) as refused:
        editor.ask(scripted_daemon, body)
    assert (refused.value.status, refused.value.prompt_too_large) == (400, too_large)


def test_thinking_comes_once() -> None:
    """Zed shows what stands in either field, so it stands in one."""
    written = encoder().deltas(0, [Delta(ReasoningDelta("Hm.")), Delta(TextDelta("Hi.", 0))])
    answer = read(written.splitlines())
    assert (answer.thinking, answer.text) == ("Hm.", "Hi.")


def test_an_error_in_a_stream() -> None:
    """Zed shows its words, also after a part of an answer and a comment."""
    answers = encoder()
    written = answers.deltas(0, [Delta(TextDelta("Hi", 0))]) + answers.keepalive()
    with pytest.raises(StreamError, match="the model is gone"):
        read((written + answers.failure(APIError(500, "the model is gone"))).splitlines())


@pytest.mark.slow
def test_thinking_between_calls(thinking_daemon: RunningDaemon) -> None:
    """Thinking is told apart, comes back, and is not computed again."""
    editor = zed(thinking_daemon)
    look = call("read_file", path="a")
    task = plan(["I look.\n</think>\n", look], "Well.\n</think>\n\nDone.")
    messages = [SYSTEM, user(task)]
    drifts = thinking_daemon.log().count("history drift")
    first = editor.ask(thinking_daemon, editor.body(messages, [READ_FILE]))
    assert (first.thinking.strip(), first.text) == ("I look.", "")
    messages += [assistant(first, interleaved=True), result(first.calls[0], "21 degrees")]
    second = editor.ask(thinking_daemon, editor.body(messages, [READ_FILE]))
    assert (second.thinking.strip(), second.text, second.stop) == ("Well.", "Done.", "end of turn")
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert thinking_daemon.log().count("history drift") == drifts
