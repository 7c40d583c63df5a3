"""Answers that are held to something, beside tools."""

import pytest

from .running import RunningDaemon

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
STRICT = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


@pytest.mark.parametrize("held", [{"choice": [f"So: {CALL}"]}, {"regex": "So: <tool_call>.*"}])
def test_what_was_asked_for_is_text(
    tiny_daemon: RunningDaemon, held: dict[str, str | list[str]]
) -> None:
    """Although it says a call, which no schema of a tool would let through."""
    first = tiny_daemon.post({"prompt": "So", "add_special_tokens": False}, "/tokenize").json()
    asked = {
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [STRICT],
        "structured_outputs": held,
        "logit_bias": {first["tokens"][0]: 100},  # and no call, which would be allowed too
        "max_tokens": 200,
    }
    (choice,) = tiny_daemon.post(asked).json()["choices"]
    text = choice["message"]["content"]
    assert text.startswith("So: <tool_call>")
    assert "tool_calls" not in choice["message"]
    if "choice" in held:
        assert text == f"So: {CALL}"
        assert choice["finish_reason"] == "stop"
