"""`propertyNames`, which the grammar's compiler does not know, in keywords that it knows."""

from typing import Any

from ..errors import GrammarError
from .look_around import LookAround
from .schema_form import types_of
from .schema_texts import format_pattern

_LISTED = frozenset({"const", "enum", "type"})
_DESCRIBED = frozenset({"format", "maxLength", "minLength", "pattern", "type"})


def hold_names(
    new: dict[str, Any],
    names: dict[str, Any],
    value: Any,
    look_around: LookAround,
    place: str,
) -> None:
    """Allow no other names than these.

    Args:
        new: a schema that was rewritten, but for its names. It allows fewer values from then on.
        names: the keywords of its `propertyNames` that have an effect.
        value: for a name without a schema of its own, rewritten.
        look_around: rewrites patterns.
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
    _describe_names(new, names, value, look_around, place)


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
    look_around: LookAround,
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
    before = new.get("patternProperties")
    try:
        if before is None:
            written = {look_around.one(*parts): value}
        else:
            # What is neither here nor there is not allowed, either: it need not be.
            written = {look_around.one(own, *parts): each for own, each in before.items()}
    except GrammarError as error:
        raise GrammarError(str(error), place) from None
    new["patternProperties"] = written
    new["additionalProperties"] = False
