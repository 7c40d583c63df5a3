"""Words of an answer, put on lines of a terminal as they come."""

import unicodedata
from collections.abc import Callable, Iterator

from rich.cells import cell_len

_TAB = 8


class WordWrap:
    """Begins another line before a word that would not end on this one.

    A word is held back until its end has come; a character of double width, as Chinese ones are, is
    a word of its own. A word that is longer than a line is broken where the line ends.

    Args:
        columns: gives the width of the terminal, which may change.
    """

    def __init__(self, columns: Callable[[], int]) -> None:
        self._columns = columns
        self._column = 0
        self._blanks = ""
        self._word = ""

    def add(self, text: str) -> str:
        """Take a part of the text; give what can be written now."""
        return "".join(piece for character in text for piece in self._take(character))

    def end(self) -> str:
        """Give the word that was held back."""
        return "".join(self._end_word())

    def _take(self, character: str) -> Iterator[str]:
        if character == "\n":
            yield from self._end_word()
            yield character
            self._column, self._blanks = 0, ""
        elif character.isspace():
            yield from self._end_word()
            self._blanks += character
        elif unicodedata.east_asian_width(character) in "WF":
            yield from self._end_word()
            self._word = character
            yield from self._end_word()
        else:
            self._word += character
            if cell_len(self._word) > self._columns():
                yield from self._end_word()
                self._column %= self._columns()  # the terminal goes on in the next line by itself

    def _end_word(self) -> Iterator[str]:
        if not self._word:
            return
        width, after = cell_len(self._word), self._after_blanks()
        if self._column and after + width > self._columns():
            yield "\n"
            after = 0
        else:
            yield self._blanks
        yield self._word
        self._column, self._blanks, self._word = after + width, "", ""

    def _after_blanks(self) -> int:
        column = self._column
        for blank in self._blanks:
            column += _TAB - column % _TAB if blank == "\t" else cell_len(blank)
        return column
