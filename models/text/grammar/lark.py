"""Grammars in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import llguidance

from ...errors import GrammarError
from .schema_rewrite import SchemaReader

_JSON_OPTIONS = {
    # Bounded: a model that has nothing to say writes line after line.
    "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}",
    # Without \u, by which another spelling of a name would evade that name's schema.
    "json_allowed_escapes": 'nrbtf"\\',
}
_MOST_OPTIONS = 10_000
_LONGEST = 100_000  # characters of all options, or of a pattern


class Lark:
    """A grammar under construction; its start is the rule `start`.

    Args:
        special: numbers of the tokens that write nothing, by name; a grammar matches their numbers.
        added: texts that are tokens of their own, special or not.

    Attributes:
        schemas: reader of the grammar's schemas.
    """

    def __init__(self, special: Mapping[str, int], added: AbstractSet[str]) -> None:
        self.added = added
        self.schemas = SchemaReader()
        self._special = special
        names = sorted(special, key=len, reverse=True)  # the longer of two names wins
        self._tokens = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")
        self._rules = [r"TEXT: /(?s:.*)/"]
        self._names: dict[str, str] = {}

    def __str__(self) -> str:
        return "\n".join(self._rules) + "\n"

    def rule(self, name: str, body: str) -> None:
        """Define a rule, or a terminal if the name is in upper case."""
        self._rules.append(f"{name}: {body}")

    def text(self, text: str) -> str:
        """Match a text, however it is cut into tokens."""
        return json.dumps(text, ensure_ascii=False)

    def marker(self, marker: str) -> str:
        """Match a marker: special tokens by number, the rest as text."""
        parts = filter(None, self._tokens.split(marker))
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else self.text(part)
            for part in parts
        )

    def free(self, without: Iterable[str] = ()) -> str:
        """Match any text without the given ones."""
        barred = [self.text(text) for text in without]
        if not barred:
            return "TEXT"  # tokens that write nothing do not match it
        return self._named("TEXT", f"TEXT & ~(TEXT ({' | '.join(barred)}) TEXT)")

    def beginning_with(self, texts: Iterable[str]) -> str:
        """Match any text that begins with one of the given ones, blanks before it ignored."""
        return rf"/[ \t\r\n]*/ ({' | '.join(map(self.text, texts))}) TEXT"

    def up_to(self, end: str, without: Iterable[str] = (), condition: str = "") -> str:
        """Match text up to the first `end` marker, and the marker.

        The text has none of `without`, and also matches the terminal `condition`.
        """
        text = self.free(without)
        if condition:
            text = f"({text} & ({condition}))"
        if any(end.startswith(name) for name in self._special):
            text = self._named("UNTIL", text) if condition else text
            return self._named("up_to", f"{text} {self.marker(end)}")
        return self._named("up_to", f"{text} {self.text(end)}", "[lazy]")

    def json(self, schema: Any) -> str:
        """Match JSON by a rewritten schema."""
        return self._named("json", f"%json {json.dumps(as_document(schema, self.schemas))}")

    def pattern(self, pattern: str) -> str:
        """Write a regular expression as a terminal; raise GrammarError for an invalid one."""
        if not pattern:
            raise GrammarError("the pattern is empty")
        if len(pattern) > _LONGEST:
            raise GrammarError(f"the pattern has more than {_LONGEST} characters")
        if _escapes(pattern):
            raise GrammarError("the pattern ends with a backslash that escapes nothing")
        # The pattern matches the whole answer anyway; the compiler knows no anchors.
        pattern = pattern.removeprefix("^")
        if pattern.endswith("$") and not _escapes(pattern[:-1]):
            pattern = pattern[:-1]
        return f"/{llguidance.regex_to_lark(pattern, '')}/"

    def one_of(self, options: list[str]) -> str:
        """Write a choice of texts; raise GrammarError for none, an empty one, or too many."""
        if not options or "" in options:
            raise GrammarError("a choice needs options, and an option cannot be empty")
        if len(options) > _MOST_OPTIONS or sum(map(len, options)) > _LONGEST:
            words = f"{_MOST_OPTIONS} options and {_LONGEST} characters together"
            raise GrammarError(f"a choice has at most {words}")
        return " | ".join(self.text(option) for option in dict.fromkeys(options))

    def _named(self, kind: str, body: str, flags: str = "") -> str:
        if body not in self._names:
            self._names[body] = f"{kind}_{len(self._names) + 1}"
            self.rule(f"{self._names[body]}{flags}", body)
        return self._names[body]


def _escapes(pattern: str) -> bool:
    """True if the end of a pattern escapes the next character."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def as_document(schema: Any, reader: SchemaReader) -> dict[str, Any]:
    """Make a document of a rewritten schema, with its definitions and the spelling of JSON."""
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
