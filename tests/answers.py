"""Answers of every protocol, read alike."""

import json
from collections.abc import Iterator
from typing import Any

from .daemon.running import Reply


def named_events(body: bytes) -> list[tuple[str, Any]]:
    """Read a stream's events, of which each has its name as its type."""
    blocks = [block.split("\n", 1) for block in body.decode().split("\n\n") if block]
    events = [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in blocks
    ]
    assert all(name == data["type"] for name, data in events)
    return events


class Answer:
    """An answer of any of the protocols.

    Args:
        reply: as it came.
        plain: what the same request without the feature got.
    """

    def __init__(self, reply: Reply, plain: "Answer | None") -> None:
        self.raw = reply.body
        self.plain = plain
        self.streamed = reply.headers.get("Content-Type", "").startswith("text/event-stream")
        self.body: dict[str, Any] = {} if self.streamed else reply.json()

    @property
    def text(self) -> str:
        """The text of the first answer."""
        if choices := self.body.get("choices"):
            return str(choices[0].get("text") or choices[0]["message"]["content"] or "")
        return "".join(str(part.get("text", "")) for part in self._parts())

    @property
    def calls(self) -> list[str]:
        """The names of the tools that the first answer calls."""
        if choices := self.body.get("choices"):
            calls = choices[0].get("message", {}).get("tool_calls", [])
            return [call["function"]["name"] for call in calls]
        blocks = [*self.body.get("output", []), *self.body.get("content", [])]
        return [b["name"] for b in blocks if b["type"] in ("function_call", "tool_use")]

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt had, those from the cache too."""
        usage = self.body["usage"]
        names: tuple[str, ...] = ("prompt_tokens", "input_tokens")
        if "output" not in self.body:  # Anthropic's count leaves out what was cached
            names += ("cache_read_input_tokens", "cache_creation_input_tokens")
        return sum(usage.get(name) or 0 for name in names)

    @property
    def longer_prompt(self) -> bool:
        """Return True if the feature reached the prompt."""
        return self.plain is not None and self.prompt_tokens > self.plain.prompt_tokens

    def _parts(self) -> Iterator[dict[str, Any]]:
        yield from self.body.get("content", [])
        for item in self.body.get("output", []):
            yield from item.get("content") or []
