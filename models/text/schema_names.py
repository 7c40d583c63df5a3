"""`propertyNames`, which the grammar's compiler does not know, in keywords that it knows."""

from typing import Any

from ..errors import GrammarError
from .schema_form import types_of, within
from .schema_texts import check_pattern, format_pattern

_LISTED = frozenset({"const", "enum", "type"})
_DESCRIBED = frozenset({"format", "maxLength", "minLength", "pattern", "type"})


def hold_names(
    new: dict[str, Any],
    names: dict[str, Any],
    value: Any,
    place: str,
) -> None:
    """Allow no other names than these.

    Args:
        new: a schema that was rewritten, but for its names. It allows fewer values from then on.
        names: the keywords of its `propertyNames` that have an effect.
        value: for a name without a schema of its own, rewritten.
        place: of the names' schema.

    Raises:
        GrammarError: they cannot be held to.
    """
    if "string" not in types_of(names):
        raise GrammarError("must allow texts", place)
    if names.keys() <= _LISTED and names.keys() & {"const", "enum"}:
        if "patternProperties" in new:
            raise GrammarError("is not supported beside patternProperties", place)
        _list_names(new, names, value)
        return
    if not names.keys() <= _DESCRIBED:
        words = "is supported only with enum or const, or with pattern, lengths and format"
        raise GrammarError(words, place)
    if new.get("properties"):
        raise GrammarError("is not supported beside properties", place)
    _describe_names(new, names, value, place)


def _list_names(new: dict[str, Any], names: dict[str, Any], value: Any) -> None:
    listed = [names["const"]] if "const" in names else names["enum"]
    if "const" in names and "enum" in names:
        listed = [name for name in listed if name in names["enum"]]
    own = new.get("properties", {})
    texts = [name for name in listed if isinstance(name, str)]
    new["properties"] = {name: own.get(name, value) for name in texts}
    new["additionalProperties"] = False


def _describe_names(
    new: dict[str, Any],
    names: dict[str, Any],
    value: Any,
    place: str,
) -> None:
    parts = [names["pattern"]] if "pattern" in names else []
    if "minLength" in names or "maxLength" in names:
        most = names.get("maxLength")
        bounds = f"{int(names.get('minLength', 0))},{'' if most is None else int(most)}"
        parts.append(rf"^[\s\S]{{{bounds}}}$")
    held = format_pattern(names["format"], place) if "format" in names else None
    parts += [] if held is None else [held]
    if not parts:
        return
    if len(parts) > 1 or "patternProperties" in new:
        words = "is supported only with one of pattern, lengths and format, and alone"
        raise GrammarError(words, place)
    check_pattern(parts[0], within(place, "pattern"))
    new["patternProperties"] = {parts[0]: value}
    new["additionalProperties"] = False
