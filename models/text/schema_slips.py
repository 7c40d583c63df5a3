"""Slips that generators of JSON schemas make, mended before a schema is used.

A Go struct without a value writes null where a keyword is absent, PHP writes an empty object as
`[]`, and draft 3 wrote `required: true` into a property. None of them says anything of a value.
"""

from typing import Any

from .schema_form import SCHEMA, SCHEMAS, SCHEMAS_BY_NAME

_NULLABLE = frozenset({"const", "default"})
"""Keywords of which null is a value."""


def mended(schema: Any) -> Any:
    """Return a schema without slips, and without `not` where that allows all values or none.

    Args:
        schema: decoded JSON; it has been measured, and is not changed.
    """
    if schema == []:
        return {}
    if not isinstance(schema, dict):
        return schema
    left = {keyword: value for keyword, value in schema.items() if not _is_slip(keyword, value)}
    if "not" in left:
        excluded = mended(left["not"])
        if excluded is True or excluded == {}:
            return False
        if excluded is False:
            del left["not"]
    return {keyword: _mended_value(keyword, value) for keyword, value in left.items()}


def _is_slip(keyword: str, value: Any) -> bool:
    if value is None:
        return keyword not in _NULLABLE
    return keyword == "required" and isinstance(value, bool)


def _mended_value(keyword: str, value: Any) -> Any:
    if keyword in SCHEMAS_BY_NAME and value == []:
        return {}
    if keyword in SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: {} if each is None else mended(each) for name, each in value.items()}
    if isinstance(value, list) and value and (keyword in SCHEMAS or keyword == "items"):
        return [mended(each) for each in value]
    if keyword in SCHEMA or keyword == "items":
        return mended(value)
    return value
