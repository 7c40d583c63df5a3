"""A call from its first marker to its last, in text that arrives in pieces."""

import json
import re
from collections.abc import Callable, Iterable

from .formats import ToolFormat
from .json_text import JsonSpan

_MOST = 4 * 2**20  # characters of a call that is not streamed
_LONGEST_HEAD = 4096  # characters before the arguments of a streamed call
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
_OPENED = re.compile(r"\s*(?=\{)")
_BLANKS = re.compile(r"[ \t\r\n]*")


class StreamedArguments:
    """A call's name and arguments as they arrive, if a grammar guarantees the call.

    Only for forms that write the arguments as one JSON object; for others nothing is returned.

    Args:
        called: the tool's name if it came before the call; otherwise the form is the generic one.

    Attributes:
        name: of the tool; None until it is whole and the arguments begin.
    """

    def __init__(self, called: str = "") -> None:
        self.name: str | None = None
        self._called = called
        self._head: str | None = ""
        self._span = JsonSpan()

    @property
    def done(self) -> bool:
        """True if the arguments have ended."""
        return self._span.done

    def push(self, text: str) -> str:
        """Take more of the text between the markers; return more of the arguments."""
        if self._head is None or self.done:
            return ""
        if self.name is None:
            self._head += text
            match = (_OPENED if self._called else _HEAD).match(self._head)
            if match is None:
                # The guarantee does not hold: the call is read when it is whole.
                self._head = None if len(self._head) > _LONGEST_HEAD else self._head
                return ""
            self.name = self._called or json.loads(match[1], strict=False)
            text = self._head[match.end() :]
        return text[: self._span.feed(text, 0)]


class OpenCall:
    """Collects a call. In JSON, an end marker inside a string does not end it.

    Attributes:
        begin: index in the answer at which its start marker begins.
        refused: it is no call.
        ended: it is whole.
    """

    def __init__(self, form: ToolFormat, begin: int) -> None:
        self.form = form
        self.begin = begin
        self.refused = self.ended = False
        self._read_on: Callable[[OpenCall, str, int], int] = OpenCall._first
        self._parts: list[str] = []
        self._size = 0
        self._tail = ""  # end of the searched text that may begin the end marker
        self._marked = False
        self._span = JsonSpan()

    def feed(self, text: str, start: int) -> int:
        """Read on from `text[start]`; return the index at which the call or the text ends."""
        at = start
        while at < len(text) and not (self.ended or self.refused):
            end = self._read_on(self, text, at)
            self._parts.append(text[at:end])
            self._size += end - at
            at = end
            if self._size > _MOST and not self.ended:
                self.refused = True
        return at

    @property
    def text(self) -> str:
        """All text of the call, markers included."""
        return self.form.start + "".join(self._parts)

    @property
    def body(self) -> str:
        """Text between the markers."""
        text = "".join(self._parts)
        return text.removesuffix(self.form.end) if self._marked else text

    @property
    def is_json(self) -> bool:
        """True if a whole JSON value has come."""
        return self._span.done

    @property
    def may_end(self) -> bool:
        """True if the call can be whole without its end marker."""
        return not self.form.end or self._span.done

    @property
    def words(self) -> int:
        """Characters of `text` that are plain text for certain, if this is no call.

        Fewer than all if the start marker recurs: the first one may have been plain text.
        """
        text, begin = self.text, len(self.form.start)
        if self._span.broken and self.form.end:
            first = text.find(self.form.end, begin)
            text = text[: first + len(self.form.end)] if first >= 0 else text
        again = text.rfind(self.form.start, begin)
        return len(text) if again < 0 else again

    def _first(self, text: str, at: int) -> int:
        """Read up to the first character, which tells JSON from other forms."""
        match = _BLANKS.match(text, at)
        at = match.end() if match else at
        if at < len(text):
            self.refused = self.form.only_json and text[at] not in "{["
            self._read_on = OpenCall._json if text[at] in "{[" else OpenCall._seek
        return at

    def _json(self, text: str, at: int) -> int:
        end = self._span.feed(text, at)
        if self._span.done:
            self._read_on = OpenCall._seek
            self.ended = not self.form.end
        elif self._span.broken:
            self._read_on = OpenCall._seek
            # An end marker inside an apparent string has ended the call.
            read = "".join(self._parts) + text[at:end]
            self.refused = self.form.only_json or (bool(self.form.end) and self.form.end in read)
        return end

    def _seek(self, text: str, at: int) -> int:
        end, longest = self.form.end, max(0, len(self.form.end) - 1)
        limit = min(len(text), at + _MOST + 1 - self._size)
        if not end:
            return limit
        border = self._tail + text[at : min(limit, at + longest)]
        if (found := border.find(end)) >= 0:
            after = at + found + len(end) - len(self._tail)
        elif (found := text.find(end, at, limit)) >= 0:
            after = found + len(end)
        else:
            self._tail = (self._tail + text[max(at, limit - longest) : limit])[-longest:]
            return limit
        self.ended = self._marked = True
        return after


class WrittenCall:
    """A call whose arguments are arriving, compared with earlier calls of its answer.

    JSON texts are equal if they differ only in blanks between tokens.
    """

    def __init__(self, name: str, earlier: Iterable["WrittenCall"]) -> None:
        self.name = name
        self._parts: list[str] = []
        self._length = 0
        self._held = ""
        self._same = [each.compact for each in earlier if each.name == name]
        self._in_string = self._escaped = False

    @property
    def compact(self) -> str:
        """The arguments without blanks between tokens."""
        return "".join(self._parts)

    @property
    def is_held(self) -> bool:
        """True while the arguments begin, or are, those of an earlier call."""
        return bool(self._same)

    def push(self, text: str) -> str:
        """Take more of the arguments; return the part that is certainly new."""
        more = self._without_blanks(text)
        self._same = [each for each in self._same if each.startswith(more, self._length)]
        self._parts.append(more)
        self._length += len(more)
        held, self._held = self._held + text, ""
        if self._same:
            held, self._held = "", held
        return held

    def _without_blanks(self, text: str) -> str:
        kept = []
        for letter in text:
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter in " \t\r\n":
                continue
            else:
                self._in_string = letter == '"'
            kept.append(letter)
        return "".join(kept)
