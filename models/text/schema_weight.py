"""What compiling a schema may cost: bounds on what grows faster than a schema's text."""

from decimal import Decimal
from typing import Any, NamedTuple

from ..errors import GrammarError
from .schema_form import within

_MOST_NAMES = 2000
_MOST_COMBINATIONS = 100
_MOST_PATTERNS = 8
_MOST_MULTIPLES = 10_000
_DEEPEST = 100


class _Weight(NamedTuple):
    """What becomes of a schema when all that applies to one value is merged.

    Attributes:
        names: properties; compiling an object takes their square.
        combinations: of the options of several lists of options.
        patterns: that one text must match; to tell whether any does takes the time's double
            with each.
    """

    names: int
    combinations: int
    patterns: int


class Scale:
    """Weighs rewritten schemas.

    Args:
        definitions: what they refer to.
    """

    def __init__(self, definitions: dict[str, Any]) -> None:
        self._definitions = definitions
        self._known: dict[int, _Weight] = {}
        self._multiples = 0

    def weigh(self, schema: dict[str, Any], place: str) -> None:
        """See that a schema is not too heavy, what is below it aside.

        Raises:
            GrammarError: it is.
        """
        weight = self._weight(schema, place, 0)
        if weight.names > _MOST_NAMES:
            raise GrammarError(f"has over {_MOST_NAMES} properties", place)
        if weight.combinations > _MOST_COMBINATIONS:
            words = f"has over {_MOST_COMBINATIONS} combinations of alternatives"
            raise GrammarError(words, place)
        if weight.patterns > _MOST_PATTERNS:
            raise GrammarError(f"has over {_MOST_PATTERNS} patterns for one text", place)
        if "multipleOf" in schema:
            # Remainders of so many are told apart, digit by digit.
            number = Decimal(str(schema["multipleOf"])).normalize().as_tuple()
            zeros = max(0, int(number.exponent))
            self._multiples += int(Decimal((0, number.digits, min(zeros, 5))))
            if self._multiples > _MOST_MULTIPLES:
                words = f"is too great: all of them together may be {_MOST_MULTIPLES}"
                raise GrammarError(words, within(place, "multipleOf"))

    def _weight(self, schema: Any, place: str, depth: int) -> _Weight:
        if not isinstance(schema, dict):
            return _Weight(0, 1, 0)
        if id(schema) in self._known:
            return self._known[id(schema)]
        if depth > _DEEPEST:
            raise GrammarError(f"leads to over {_DEEPEST} schemas, one inside the other", place)
        self._known[id(schema)] = _Weight(0, 1, 0)  # for one that leads back to itself
        names, combinations = len(schema.get("properties", {})), 1
        patterns = ("pattern" in schema) + ("format" in schema)
        target = self._definitions.get(str(schema.get("$ref")).removeprefix("#/$defs/"))
        for part in [target, *schema.get("allOf", [])]:
            weight = self._weight(part, place, depth + 1)
            names += weight.names
            combinations *= weight.combinations
            patterns += weight.patterns
        for keyword in ("anyOf", "oneOf"):
            options = [self._weight(part, place, depth + 1) for part in schema.get(keyword, [])]
            names += sum(option.names for option in options)
            combinations *= sum(option.combinations for option in options) or 1
            patterns += max((option.patterns for option in options), default=0)
        heaviest = _Weight(names, min(combinations, _MOST_COMBINATIONS + 1), patterns)
        self._known[id(schema)] = heaviest
        return heaviest
