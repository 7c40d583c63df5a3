"""Calls that an answer has made before, told while they are written."""

from collections.abc import Iterable


class WrittenCall:
    """A call whose arguments are coming, compared with earlier ones of its answer.

    Texts of JSON are equal here if they differ in blanks between their tokens only.

    Args:
        name: of the tool.
        earlier: the calls before it, whole.
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
        """The arguments so far, without blanks between their tokens."""
        return "".join(self._parts)

    @property
    def is_held(self) -> bool:
        """True while the arguments begin, or are, those of an earlier call."""
        return bool(self._same)

    def push(self, text: str) -> str:
        """Take more of the arguments; return what is certain to be new."""
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
