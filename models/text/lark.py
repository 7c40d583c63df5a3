"""Writes grammars in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from .schema_meaning import SchemaReader

_JSON_OPTIONS = {
    # Bounded: a model that has nothing to say would write line after line.
    "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}",
    # Without \u, which lets a name be written in several ways: one that has a schema of its own
    # would be taken for another.
    "json_allowed_escapes": 'nrbtf"\\',
}


class Lark:
    """A grammar that is being written. Its start is the rule `start`.

    Args:
        special: tokens that write nothing and are matched by their number, by name.
        added: texts that are tokens of their own, special or not.
    """

    def __init__(self, special: Mapping[str, int], added: AbstractSet[str]) -> None:
        self.added = added
        self._special = special
        names = sorted(special, key=len, reverse=True)  # of two that begin alike the longer one
        self._tokens = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")
        self._rules = [r"TEXT: /(?s:.*)/"]
        self._names: dict[str, str] = {}

    def __str__(self) -> str:
        return "\n".join(self._rules) + "\n"

    def rule(self, name: str, body: str) -> None:
        """Define a rule, or in upper case a terminal."""
        self._rules.append(f"{name}: {body}")

    def text(self, text: str) -> str:
        """Match a text, however it is cut into tokens."""
        return json.dumps(text, ensure_ascii=False)

    def knows(self, marker: str) -> bool:
        """Whether a marker is a special token, or begins with one."""
        return any(marker.startswith(name) for name in self._special)

    def marker(self, marker: str) -> str:
        """Match a marker: special tokens where it has such, else its text."""
        parts = filter(None, self._tokens.split(marker))
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else self.text(part)
            for part in parts
        )

    def free(self, without: Iterable[str] = ()) -> str:
        """Match any text.

        Args:
            without: texts that do not stand in it.
        """
        barred = [self.text(text) for text in without]
        if not barred:
            return "TEXT"  # no token that writes nothing is text
        return self._named("TEXT", f"TEXT & ~(TEXT ({' | '.join(barred)}) TEXT)")

    def beginning_with(self, texts: Iterable[str]) -> str:
        """Match any text that begins with one of some, blanks before it aside."""
        return rf"/[ \t\r\n]*/ ({' | '.join(map(self.text, texts))}) TEXT"

    def up_to(self, marker: str, without: Iterable[str] = ()) -> str:
        """Match any text and the first of a marker behind it.

        Args:
            marker: ends what is matched.
            without: texts that do not stand before it.
        """
        text = self.free(without)
        if self.knows(marker):
            return self._named("up_to", f"{text} {self.marker(marker)}")
        return self._named("up_to", f"{text} {self.text(marker)}", "[lazy]")

    def until(self, end: str, without: Iterable[str], condition: str) -> str:
        """Match text up to the first of what ends it, and that.

        Args:
            end: what ends it.
            without: texts that do not stand in it.
            condition: a terminal that it matches besides.
        """
        whole = f"({self.free(without)} & ({condition}))"
        if self.knows(end):
            return f"{self._named('UNTIL', whole)} {self.marker(end)}"
        return self._named("until", f"{whole} {self.text(end)}", "[lazy]")

    def json(self, schema: Any, reader: SchemaReader) -> str:
        """Match JSON.

        Args:
            schema: rewritten.
            reader: that rewrote it.
        """
        return self._named("json", f"%json {json.dumps(as_document(schema, reader))}")

    def _named(self, kind: str, body: str, flags: str = "") -> str:
        """Give a name to what a rule matches, the same one each time."""
        if body not in self._names:
            self._names[body] = f"{kind}_{len(self._names) + 1}"
            self.rule(f"{self._names[body]}{flags}", body)
        return self._names[body]


def as_document(schema: Any, reader: SchemaReader) -> dict[str, Any]:
    """Make a document of a rewritten schema: with what it refers to, and how JSON is written."""
    definitions: dict[str, Any] = {}
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left.extend(value)
        elif isinstance(value, dict):
            left.extend(value.values())
            name = str(value.get("$ref", "")).removeprefix("#/$defs/")
            if name in reader.definitions and name not in definitions:
                definitions[name] = reader.definitions[name]
                left.append(definitions[name])
    return {"x-guidance": _JSON_OPTIONS, "$defs": definitions, **({} if schema is True else schema)}
