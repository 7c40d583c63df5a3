"""Schemas: what is honoured is honoured, and the rest refused with its place."""

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from umbel.models.errors import GrammarError
from umbel.models.text.conversation import JSONObject, JSONSchema
from umbel.models.text.grammar.compiler import GrammarCompiler
from umbel.models.text.grammar.schema_check import check
from umbel.models.text.grammar.schema_rewrite import SchemaReader

from .walks import follow

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel


@pytest.fixture(scope="module")
def compiler(tiny: "LoadedModel") -> GrammarCompiler:
    return GrammarCompiler(tiny.text)


REFUSED: list[tuple[Any, str, str]] = [
    (5, "", "must be a schema"),
    ({"type": "strin"}, "type", "must be one of"),
    ({"properties": {"a": 1}}, "properties.a", "must be a schema"),
    ({"properties": ["a"]}, "properties", "must be an object"),
    ({"anyOf": [None]}, "anyOf.0", "must be a schema"),
    ({"items": {"required": "a"}}, "items.required", "must be a list of names"),
    ({"anyOf": []}, "anyOf", "not empty"),
    ({"anyOf": [{}, {"minItems": -1}]}, "anyOf.1.minItems", "0 or greater"),
    ({"maximum": "1"}, "maximum", "must be a number"),
    ({"multipleOf": 0}, "multipleOf", "greater than 0"),
    ({"$defs": {"x": {"enum": 1}}}, "$defs.x.enum", "must be a list"),
    ({"properties": {"a.b": {"pattern": 1}}}, 'properties."a.b".pattern', "must be a text"),
    ({"properties": {"a": {"uniqueItems": True}}}, "properties.a.uniqueItems", "at most 6"),
    ({"items": {"enum": list(range(7))}, "uniqueItems": True}, "uniqueItems", "at most 6"),
    ({"type": ["array", "null"], "uniqueItems": True}, "uniqueItems", "at most 6"),
    ({"not": {"type": "null"}}, "not", "not supported"),
    ({"if": {}, "then": {"type": "null"}}, "if", "not supported"),
    ({"contains": {}}, "contains", "not supported"),
    ({"propertyNames": {"anyOf": [{"const": "a"}]}}, "propertyNames", "only with enum"),
    ({"propertyNames": {"type": "integer"}}, "propertyNames", "must allow texts"),
    ({"propertyNames": {"format": "uri"}}, "propertyNames.format", "not supported here"),
    ({"propertyNames": {"maxLength": 3}, "properties": {"a": {}}}, "propertyNames", "beside"),
    ({"propertyNames": {"maxLength": 3, "pattern": "a"}}, "propertyNames", "only with one of"),
    (
        {"propertyNames": {"maxLength": 3}, "patternProperties": {"^x+$": {}}},
        "propertyNames",
        "only with one of",
    ),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "$defs.a",
        "refers to itself",
    ),
    (
        {
            "properties": {"x": {"$ref": "#/$defs/a"}},
            "required": ["x"],
            "$defs": {"a": {"title": "A", "$ref": "#/$defs/a"}},
        },
        "$defs.a",
        "refers to itself and says nothing else",
    ),
    ({"anyOf": [{"$ref": "#"}]}, "", "no value can match it"),
    ({"$ref": f"#/allOf/{'9' * 5000}", "allOf": [{}]}, "$ref", "no schema is"),
    ({"oneOf": [{"const": 10**400}, {"const": 1}]}, "oneOf.0.const", "too large"),
    (
        {"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"pattern": "(?<!a)b"}}},
        "propertyNames.pattern",
        "look-around",
    ),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", "not supported"),
    ({"dependencies": {"a": ["b"]}}, "dependencies", "not supported"),
    ({"dependentSchemas": {"a": {}}}, "dependentSchemas", "not supported"),
    ({"unevaluatedProperties": False}, "unevaluatedProperties", "not supported"),
    ({"unevaluatedItems": False}, "unevaluatedItems", "not supported"),
    ({"$dynamicRef": "#x"}, "$dynamicRef", "not supported"),
    ({"$ref": "http://example.org/a"}, "$ref", "only references within the schema"),
    ({"items": {"$ref": "#/$defs/a"}}, "items.$ref", "where no schema is"),
    ({"$ref": "#a", "$defs": {"b": {"$anchor": "a"}}}, "$ref", "anchors are not supported"),
    ({"$ref": "#/x/0", "x": [{"type": "no"}]}, "x.0.type", "must be one of"),
    (
        {"properties": {"a": {"$id": "http://x/y", "items": {"$ref": "#/$defs/b"}}}},
        "properties.a.items.$ref",
        "another $id",
    ),
    ({"minProperties": 2}, "minProperties", "more than one name"),
    ({"const": 10**30}, "const", "too large"),
    ({"const": ["a\u0001"]}, "const", "control characters"),
    ({"type": "integer", "minimum": 2**64}, "minimum", "too large"),
    ({"items": {"pattern": "(?<!a)b"}}, "items.pattern", "look-around"),
    ({"patternProperties": {"(?<!a)b": {}}}, "patternProperties.(?<!a)b", "look-around"),
    ({"patternProperties": {"(?!a)b": {}}}, "patternProperties.(?!a)b", "look-around"),
    ({"properties": {"a": {"pattern": r"^a\\(?=b)"}}}, "properties.a.pattern", "look-around"),
    (
        {"oneOf": [{"$ref": "#/$defs/a", "not": {"enum": [1]}}, {}], "$defs": {"a": {}}},
        "oneOf.0.not",
        "not supported",
    ),
    (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "no"}}},
        "$defs.a.type",
        "must be one of",
    ),
    ({"patternProperties": {"a(": {}}}, "patternProperties.a(", "unclosed group"),
    ({"patternProperties": {"a": {}, "b": {}}}, "", "do not exclude each other"),
    (
        {"properties": {"a": {"oneOf": [{"type": "number"}, {"minimum": 1}]}}},
        "properties.a",
        "no value can match two",
    ),
    (
        {"type": "object", "required": ["a"], "properties": {"a": {"enum": []}}},
        "properties.a",
        "no value can match it",
    ),
    (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"items": {"pattern": "(((.{1,50}x?){1,50}y?){1,50}z?){1,50}"}}},
        },
        "$defs.a.items.pattern",
        "too complex",
    ),
]


@pytest.mark.parametrize(("schema", "place", "words"), REFUSED)
def test_a_refusal_names_the_place(
    compiler: GrammarCompiler, schema: Any, place: str, words: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(JSONSchema(schema))
    assert (caught.value.place, words in str(caught.value)) == (place, True), caught.value


A = {"type": "object", "properties": {"k": {"const": 1, "default": 1}, "x": {}}}
B = {"type": "object", "properties": {"k": {"const": 2, "default": 2}, "x": {}}}

HONOURED: list[tuple[Any, list[str], list[str]]] = [
    # Names cannot be written in a second way, and so slip past the schema that they have.
    ({"properties": {"a": {"type": "integer"}}}, ['{"b":1}'], ['{"\\u0061":"x"}', '{"a":"x"}']),
    ({"type": "string", "uniqueItems": True}, ['"a"'], ["1"]),
    (
        {"oneOf": [{"type": "object", "properties": {"t": {"const": i}}} for i in range(3)]},
        ['{"t":0}', '{"t":2}'],
        ["{}", '{"u":1}'],
    ),
    ({"type": "object", "propertyNames": {"format": "password"}}, ['{"a":1}'], ["1"]),
    ({"type": "array", "uniqueItems": False}, ["[1,1]"], []),
    ({"exclusiveMinimum": True, "minimum": 3, "type": "integer"}, ["4"], ["3"]),
    ({"type": "integer", "maximum": 2**63 - 1, "minimum": 0}, ["5"], [str(2**63), "-1"]),
    ({"type": "integer", "format": "int32"}, ["2147483647"], ["2147483648"]),
    ({"type": "integer", "format": "int32", "minimum": 5}, ["5"], ["4"]),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-04-31"']),
    ({"format": "date", "pattern": "^2", "type": "string"}, ['"2024-01-01"'], ['"1999-01-01"']),
    ({"items": [{"type": "null"}], "additionalItems": False}, ["[null]"], ["[1]", "[null,1]"]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}}, ["[1,2]"], ["[2"]),
    ({"$ref": "#/c/a~1b/c%20d", "c": {"a/b": {"c d": {"const": 1}}}}, ["1"], ["2"]),
    ({"$id": "http://x/y", "$ref": "http://x/y#/a", "a": {"const": 1}}, ["1"], ["2"]),
    ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, ["[1]"], ["[]", "[1,1,1]"]),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/a",
            "const": 2,
            "definitions": {"a": {"const": 1}},
        },
        ["1"],
        ["2"],
    ),
    (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {
                "a": {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
                "b": {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
            },
        },
        ['{"k":"a"}', '{"k":"b"}'],
        ['{"k":"c"'],
    ),
    ({"type": "object", "additionalProperties": False, "minProperties": 1,
      "properties": {"a": {}, "b": {}}}, ['{"b":1}'], ["{}"]),
    (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
        ['{"k":1}', '{"k":2,"x":0}'],
        ["{}", '{"x":0}', '{"k":3'],
    ),
    (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"allOf": [{"type": "object"}, B]}, {"type": "null"}],
         "$defs": {"a": {"type": "object", "properties": {"k": {"const": 1}, "o": {
             "oneOf": [{"$ref": "#/$defs/a"}, B]}}}}},
        ["null", '{"k":1,"o":{"k":1,"o":{"k":2}}}', '{"k":2}'],
        ['{"k":1,"o":{}', "{}"],
    ),
    (
        {"$schema": "http://json-schema.org/draft-07/schema#", "oneOf": [
            {"$ref": "#/definitions/a", "required": []}, {"$ref": "#/definitions/b"}],
         "definitions": {"a": A, "b": B}},
        ['{"k":1}'],
        ["{}"],
    ),
    (
        {"type": "object", "oneOf": [{"properties": each["properties"]} for each in (A, B)]},
        ['{"k":1}', '{"k":2,"x":0}'],
        ["{}", "1"],
    ),
    ({"oneOf": [{"const": 1}, {"enum": [2, 3]}, {"const": True}]}, ["1", "3", "true"], ["4"]),
    ({"type": "object", "propertyNames": {"enum": ["a", "b", 1]},
      "additionalProperties": {"type": "null"}}, ["{}", '{"a":null,"b":null}'], ['{"c', '{"a":1']),
    ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3},
      "additionalProperties": {"type": "null"}}, ['{"xy":null}'], ['{"x"', '{"wxyz', '{"xy":1']),
    ({"type": "object", "propertyNames": {"pattern": "^x+$"},
      "additionalProperties": {"type": "null"}}, ['{"xx":null}'], ['{"xy', '{"y', '{"x":1']),
    ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
     ["[]", '["a","b"]', '["b"]'], ['["a","a"', '["a","b",']),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 1, "uniqueItems": True},
     ["[]", "[1]"], ["[1,1]"]),
    ({"type": "array", "items": {"enum": [1, 1.0, True, "a"], "type": ["integer", "boolean"]},
      "uniqueItems": True, "minItems": 2}, ["[1,true]"], ["[1]", "[1,1]", '[1,"a"']),
    ({"type": "string", "pattern": r"^\(?!x[(]?=$"}, ['"(!x(="', '"!x="'], ['"a', '"(!x=="']),
    ({"type": "string", "pattern": r"^[^(?=&]+[(?!]$"}, ['"a!"', '"a?"'], ['"=!"', '"ab"']),
    ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, ["-1.5", "7"], []),
    ({"type": "string", "format": "uuid4"}, ['"0b6f8e1c-3c52-4f0e-9f0a-2f6d8f2b7c11"'],
     ['"0b6f8e1c-3c52-1']),
    ({"x-guidance": {"lenient": True}, "type": "array", "maxItems": 0}, ["[]"], ["[1"]),
    ({"title": "t", "x-anything": [1], "nullable": True, "type": "null"}, ["null"], ["1"]),
    ({"title": 1, "examples": "x", "deprecated": "v2", "$comment": [], "type": "null",
      "description": {}, "default": [], "readOnly": 1}, ["null"], ["1"]),
    # Slips of generators: they say nothing.
    ({"type": "integer", "minimum": None, "enum": None, "format": None}, ["1"], ['"a"']),
    ({"type": "object", "properties": [], "required": None, "maxProperties": 0}, ["{}"], ["1"]),
    ({"type": "object", "properties": {"a": {"type": "integer", "required": True}, "b": None},
      "additionalProperties": False}, ["{}", '{"a":1}', '{"b":"x"}'], ['{"a":"', '{"c']),
    ({"$ref": "#/x/0", "x": [{"type": "integer", "minimum": None}]}, ["1"], ['"a"']),
    ({"const": None, "default": None}, ["null"], ["1"]),
    ({"type": "array", "items": []}, ["[1]", "[]"], ["1"]),
    # A schema that is never valid, as zod writes it, and one that always is.
    ({"type": "object", "properties": {"a": {"not": {}, "description": "no"}},
      "additionalProperties": {"not": True}}, ["{}"], ['{"a', '{"b']),
    ({"anyOf": [{"not": {}}, {"type": "integer"}]}, ["1"], ['"a"']),
    ({"type": "integer", "not": {"not": {}}}, ["1"], ['"a"']),
    # Formats that are not known are annotations.
    ({"type": "string", "format": "color"}, ['"red"', '""'], ["1"]),
    ({"type": "string", "format": "regex", "minLength": 2}, ['"a("'], ['"a"']),
    ({"type": "object", "propertyNames": {"format": "color"}}, ['{"red":1}'], ["1"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), HONOURED)
def test_supported_keywords_are_enforced(
    compiler: GrammarCompiler,
    tiny: "LoadedModel",
    schema: Any,
    valid: list[str],
    invalid: list[str],
) -> None:
    grammar = compiler.compile(JSONSchema(schema))
    assert [follow(tiny.text, grammar, text) in {"complete", "may end"} for text in valid] == [
        True
    ] * len(valid)
    assert [follow(tiny.text, grammar, text) in {"complete", "may end"} for text in invalid] == [
        False
    ] * len(invalid)


KEYWORDS = {
    "type": st.sampled_from(["string", "strin", ["null", "object"], ["null", "null"], [], 1]),
    "enum": st.sampled_from([[1], "a", {}]),
    "required": st.sampled_from([["a"], ["a", "a"], "a", [1], True]),
    "minLength": st.sampled_from([0, 1.0, -1, 1.5, True, "1"]),
    "maximum": st.sampled_from([0, -1.5, True, "1"]),
    "exclusiveMinimum": st.sampled_from([1, "1"]),
    "multipleOf": st.sampled_from([1, 0.1, 0, -1]),
    "pattern": st.sampled_from(["a", 1]),
    "uniqueItems": st.sampled_from([False, 1]),
    "title": st.just("t"),
    "format": st.sampled_from(["date", 1]),
    "dependentRequired": st.sampled_from([{"a": ["b"]}, {"a": "b"}, []]),
}


def _deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional=KEYWORDS
        | {
            "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2) | st.just([]),
            "anyOf": st.lists(inner, max_size=2),
            "items": inner,
            "additionalProperties": inner,
            "not": inner,
            "$defs": st.dictionaries(st.just("d"), inner) | st.just(1),
        },
    )


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.recursive(st.booleans() | st.sampled_from([1, "a", None]), _deeper, max_leaves=6))
def test_check_agrees_with_the_metaschema(schema: Any) -> None:
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError:
        with pytest.raises(GrammarError):
            check(schema)
    else:
        check(schema)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def doubling(levels: int, keyword: str) -> dict[str, Any]:
    defs = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{levels}": {"type": "object"}}}


def looked_through(levels: int) -> dict[str, Any]:
    """Options that the compiler must tell apart, each deep inside the one before."""
    defs: dict[str, Any] = {f"a{levels}": {"type": "object"}}
    for i in range(levels):
        made: dict[str, Any] = {"oneOf": [{"$ref": f"#/$defs/a{i + 1}"}, {}]}
        for _ in range(40):
            made = {"allOf": [made]}
        defs[f"a{i}"] = made
    return {"oneOf": [{"$ref": "#/$defs/a0"}, {}], "$defs": defs}


def spelled(count: int) -> dict[str, Any]:
    """References to one large schema, each in a spelling of its own."""
    names = (
        "".join(f"%{ord(c):x}" if i >> k & 1 else c for k, c in enumerate("thedefinition"))
        for i in range(count)
    )
    refs = [{"$ref": f"#/$defs/{name}"} for name in names]
    return {
        "anyOf": refs,
        "$defs": {"thedefinition": {"properties": {f"p{i}": {} for i in range(4000)}}},
    }


def overlapping(levels: int) -> dict[str, Any]:
    """References to schemas each of which has the next in it."""
    made: dict[str, Any] = {"enum": list(range(15_000))}
    for _ in range(levels):
        made = {"items": made}
    refs = [{"$ref": "#/$defs/a" + "/items" * i} for i in range(levels)]
    return {"anyOf": refs, "$defs": {"a": made}}


def sharing(lists: int, options: int) -> dict[str, Any]:
    """Lists of options that have many names in common, and tell themselves apart by one."""
    made = [
        {
            "allOf": [{"$ref": "#/$defs/a"}],
            "type": "object",
            "properties": {"k": {"const": i}},
            "required": ["k"],
        }
        for i in range(options)
    ]
    shared = {"properties": {f"p{i}": {"const": i} for i in range(1900)}}
    properties = {f"p{i}": {"oneOf": made} for i in range(lists)}
    return {"properties": properties, "$defs": {"a": shared}}


def alternatives(lists: int, options: int) -> dict[str, Any]:
    made = [
        {"anyOf": [{"type": "object", "properties": {f"k{i}_{j}": {}}} for j in range(options)]}
        for i in range(lists)
    ]
    return {"allOf": made}


HOSTILE: list[tuple[Any, str]] = [
    (nested(10_000), "nested deeper"),
    (nested(60), "nested deeper"),
    ({"enum": list(range(100_000))}, "too large"),
    ({"description": "x" * 1_000_000}, "too long"),
    ({"properties": {f"p{i}": {} for i in range(9000)}}, "over 2000 properties"),
    ({"allOf": [{"pattern": f"x.{{{i}}}y"} for i in range(60)]}, "over 8 patterns for one text"),
    ({"allOf": [{"properties": {f"p{i}_{j}": {} for i in range(900)}} for j in range(3)]}, "2000"),
    ({"properties": {f"p{i}": {"multipleOf": 9000 + i} for i in range(99)}}, "too great"),
    (alternatives(2, 100), "combinations"),
    (alternatives(12, 3), "combinations"),
    (doubling(20, "allOf"), ""),
    (doubling(20, "oneOf"), "too many schemas"),
    ({"type": "string", "pattern": "x" * 100_000}, "characters"),
    ({"type": "string", "pattern": "(((.{1,50}x?){1,50}y?){1,50}z?){1,50}"}, "too complex"),
    ({"items": [{"pattern": f"^a{i}+$", "type": "string"} for i in range(600)]}, "over 500"),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 10**6}, ""),
    ({"type": "string", "minLength": 10**9}, "too large"),
    ({"pattern": "(?!" * 3000, "type": "string"}, "look-around"),
    ({"pattern": "\\" * 4999 + "(", "type": "string"}, ""),
    (
        {
            "oneOf": [{"$ref": f"#/$defs/{i}"} for i in range(500)],
            "$defs": {str(i): {"properties": {"k": {"enum": [i]}}} for i in range(500)},
        },
        "combinations",
    ),
    ({"type": "string", "minLength": 10**5, "maxLength": 10**12}, ""),
    (looked_through(17), "leads deeper"),
    (spelled(2000), "over 2000 properties"),
    (overlapping(40), "too many schemas"),
    (sharing(5, 100), "over 2000 properties"),
]
"""Refused schemas, with a part of the words, and accepted ones: these must be cheap to follow."""


@pytest.mark.parametrize(("schema", "words"), HOSTILE)
def test_hostile_schemas_are_bounded(
    compiler: GrammarCompiler, tiny: "LoadedModel", schema: Any, words: str
) -> None:
    """They cost little memory, and not more time than an honest large schema."""
    honest = {"properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    compiler.compile(JSONObject())
    before, began = resident(), time.thread_time()
    if words:
        with pytest.raises(GrammarError, match=words):
            compiler.compile(JSONSchema(schema))
    else:
        grammar = compiler.compile(JSONSchema(schema))
        assert follow(tiny.text, grammar, "zzz") == "not allowed"
    taken = time.thread_time() - began
    began = time.thread_time()
    GrammarCompiler(tiny.text).compile(JSONSchema(honest))
    assert taken < 10 * (time.thread_time() - began)
    assert resident() - before < 200 << 20


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:  # noqa: PTH123  (not a file)
        return int(file.read().split()[1]) * 4096


def test_other_threads_run_while_a_large_schema_compiles(tiny: "LoadedModel") -> None:
    """The longest that a thread had to wait is a small part of what compiling took."""
    compiler = GrammarCompiler(tiny.text)
    compiler.compile(JSONObject())
    large = {
        "type": "array",
        "prefixItems": [
            {"type": "object", "properties": {f"p{i}_{j}": {"type": "string"} for j in range(450)}}
            for i in range(20)
        ],
    }
    worst, stop = [0.0], threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            worst[0], last = max(worst[0], now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    compiler.compile(JSONSchema(large))
    taken = time.perf_counter() - began
    stop.set()
    watcher.join()
    assert worst[0] < taken / 4


def test_a_schema_is_not_changed() -> None:
    schema = {"exclusiveMinimum": True, "minimum": 1, "properties": {"a": {"format": "date"}}}
    before = json.dumps(schema)
    SchemaReader().read(schema)
    assert json.dumps(schema) == before
