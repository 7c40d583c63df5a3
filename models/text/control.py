"""Text of a request never becomes control tokens.

A template writes `<|im_start|>` and the like around a request's text, and the tokenizer reads such
names wherever they stand. So each name in a request's text is broken by a mark before the template
renders it, and the pieces between marks are encoded one by one: no piece holds a whole name. The
mark is drawn at random and has letters and digits only, so that it survives `tojson`, `strip` and
escaping; a client that knew it could only break its own text.

Text without names has no marks, and its tokens are the tokenizer's.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from .conversation import Conversation, Message, Tool, ToolCall

_SAID: Mapping[type, Sequence[str]] = {
    Message: ("content", "reasoning", "tool_calls", "tool_call_id", "name"),
    Tool: ("name", "description", "parameters"),
    ToolCall: ("id", "name", "arguments"),
}
"""Fields in which a request's text stands."""


class ControlText:
    """Names of a model's control tokens. Immutable, so safe from any thread.

    Args:
        names: texts that the tokenizer reads as control tokens. Single characters and blanks are
            ignored: they cannot be broken.
        normalize: the tokenizer's, if it reads names in normalised text too.
    """

    def __init__(self, names: Iterable[str], normalize: Callable[[str], str] | None = None) -> None:
        kept = {name for name in names if len(name) > 1 and not name.isspace()}
        if normalize is not None:
            kept |= {name for name in map(normalize, kept) if len(name) > 1}
        ordered = sorted(kept, key=len, reverse=True)
        pattern = "|".join(map(re.escape, ordered)) or "(?!)"
        self._normalize = normalize
        self._whole = re.compile(pattern)
        self._starts = re.compile(f"(?=({pattern}))")  # finds overlapping names too
        # Two strings may meet in a prompt: the edge of one may be half of a name.
        self._longest = max(map(len, ordered), default=0)
        self._heads = frozenset(name[:n] for name in ordered for n in range(2, len(name)))
        self._tails = frozenset(name[n:] for name in ordered for n in range(1, len(name) - 1))
        self._last_two = frozenset(head[-2:] for head in self._heads)
        self._first_two = frozenset(tail[:2] for tail in self._tails)
        self._mark = f"umbel{secrets.token_hex(8)}"

    def conversation(self, conversation: Conversation) -> Conversation:
        """Break the names in all text of a request."""
        options = {key: self.value(value) for key, value in conversation.options.items()}
        return msgspec.structs.replace(
            conversation,
            messages=self.value(conversation.messages),
            tools=self.value(conversation.tools),
            options=options,
        )

    def value(self, value: Any) -> Any:
        """Break the names in all strings of a JSON value or a message, keys included."""
        match value:
            case str():
                return self._text(value)
            case dict():
                return {self.value(key): self.value(one) for key, one in value.items()}
            case list():
                return [self.value(one) for one in value]
            case Message() | Tool() | ToolCall():
                texts = {key: self.value(getattr(value, key)) for key in _SAID[type(value)]}
                return msgspec.structs.replace(value, **texts)
        return value

    def is_marked(self, text: str) -> bool:
        """True if a text has broken names."""
        return self._mark in text

    def plain(self, text: str) -> str:
        """Remove the marks from a text."""
        return text.replace(self._mark, "")

    def pieces(self, text: str) -> list[str]:
        """Cut a rendered text so that no name of a request is whole, and remove the marks.

        A mark at the edge of a request's string cuts only if a name would arise there.
        """
        parts = text.split(self._mark)
        if len(parts) == 1:
            return parts
        whole = "".join(parts)
        inside = {
            place
            for found in self._starts.finditer(whole)
            for place in range(found.start() + 1, found.end(1))
        }
        pieces, place = [parts[0]], len(parts[0])
        for part in parts[1:]:
            if place in inside:
                pieces.append(part)
            else:
                pieces[-1] += part
            place += len(part)
        return pieces

    def _text(self, text: str) -> str:
        text = self._folded(text)
        places = set[int]()
        if self._whole.search(text):
            places = {found.start() + 1 for found in self._starts.finditer(text)}
        lengths = range(2, min(self._longest, len(text) + 1))
        if text[-2:] in self._last_two:
            places.update(len(text) - n + 1 for n in lengths if text[-n:] in self._heads)
        if text[:2] in self._first_two:
            places.update(n - 1 for n in lengths if text[:n] in self._tails)
        if not places:
            return text
        cuts = [0, *sorted(places), len(text)]
        return self._mark.join(text[a:b] for a, b in pairwise(cuts))

    def _folded(self, text: str) -> str:
        """Normalise a text if that brings names into it."""
        if self._normalize is None:
            return text
        folded = self._normalize(text)
        return folded if self._count(folded) > self._count(text) else text

    def _count(self, text: str) -> int:
        return len(self._whole.findall(text))
