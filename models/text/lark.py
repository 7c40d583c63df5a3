"""Writes grammars in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Iterable, Mapping
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
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        names = sorted(special, key=len, reverse=True)  # of two that begin alike the longer one
        self._tokens = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")
        self._rules = [r"TEXT: /(?s:.*)/"]
        self._count = 0

    def __str__(self) -> str:
        return "\n".join(self._rules) + "\n"

    def rule(self, name: str, body: str) -> None:
        """Define a rule, or in upper case a terminal."""
        self._rules.append(f"{name}: {body}")

    def text(self, text: str) -> str:
        """Match a text, however it is cut into tokens."""
        return json.dumps(text, ensure_ascii=False)

    def knows(self, marker: str) -> bool:
        """Whether a marker is a token of its own, or begins with one."""
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
        self._count += 1
        name = f"TEXT_{self._count}"
        self.rule(name, f"TEXT & ~(TEXT ({' | '.join(barred)}) TEXT)")
        return name

    def up_to(self, marker: str, without: Iterable[str] = ()) -> str:
        """Match any text and the first of a marker behind it.

        Args:
            marker: ends what is matched.
            without: texts that do not stand before it.
        """
        text = self.free(without)
        self._count += 1
        name = f"up_to_{self._count}"
        if self.knows(marker):
            self.rule(name, f"{text} {self.marker(marker)}")
        else:
            self.rule(f"{name}[lazy]", f"{text} {self.text(marker)}")
        return name

    def json(self, schema: Any, reader: SchemaReader) -> str:
        """Match JSON.

        Args:
            schema: rewritten.
            reader: that rewrote it.
        """
        self._count += 1
        name = f"json_{self._count}"
        self.rule(name, f"%json {json.dumps(as_document(schema, reader))}")
        return name


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
