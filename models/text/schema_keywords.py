"""Which keywords of a schema say something of its values, and which of them are honoured."""

from typing import Any

from .schema_form import types_of

KEPT = frozenset(
    {
        "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maximum",
        "maxProperties", "minItems", "minLength", "minimum", "minProperties", "multipleOf",
        "pattern", "required", "type",
    }
)  # fmt: skip
MANY = frozenset({"allOf", "anyOf", "prefixItems"})
_OTHERS = frozenset(
    {
        "$ref", "additionalItems", "additionalProperties", "else", "format", "items", "oneOf",
        "patternProperties", "properties", "propertyNames", "then", "uniqueItems",
    }
)  # fmt: skip
_REFUSED = {
    "$dynamicRef": "", "$recursiveRef": "", "if": "", "not": "",
    "contains": "array", "unevaluatedItems": "array",
    "dependencies": "object", "dependentRequired": "object", "dependentSchemas": "object",
    "unevaluatedProperties": "object",
}  # fmt: skip
"""What is not supported, and the one type of value that it is about."""

EFFECTIVE = KEPT | MANY | _OTHERS | _REFUSED.keys()
_WITHOUT_EFFECT: dict[str, list[Any]] = {
    "dependencies": [{}], "dependentRequired": [{}], "dependentSchemas": [{}],
    "unevaluatedItems": [True, {}], "unevaluatedProperties": [True, {}],
}  # fmt: skip


def has_unsupported_effect(keyword: str, schema: dict[str, Any]) -> bool:
    """Whether a keyword that is not supported changes which values are valid."""
    kind = _REFUSED.get(keyword)
    if kind is None or (kind and kind not in types_of(schema)):
        return False
    if keyword == "if":
        return "then" in schema or "else" in schema
    return schema[keyword] not in _WITHOUT_EFFECT.get(keyword, [])


def effective(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema's keywords that say something of its values."""
    return {keyword: value for keyword, value in schema.items() if keyword in EFFECTIVE}
