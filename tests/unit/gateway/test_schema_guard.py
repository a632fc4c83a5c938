from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal

import pydantic
import pytest
from client_schemas import CLIENT_SCHEMAS

from weft.kernel.errors.error_tree import FieldError
from weft.kernel.schemas.json_schema import SchemaLimits
from weft.kernel.schemas.schema_guard import SchemaGuard, require_safe_pattern, require_safe_schema
from weft.kernel.text.json_objects import to_json_object

LIMITS = SchemaLimits()


def chained(length: int) -> dict[str, Any]:
    """A chain of references."""
    definitions: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def either(count: int) -> dict[str, Any]:
    return {"anyOf": [{"const": n} for n in range(count)]}


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        (deep(32), ".items" * 32, "nested deeper than 32"),
        ({"description": "x" * 65_536}, "", "at most 65536 bytes"),
        ({"properties": {f"p{n}": {} for n in range(2000)}}, ".properties.p1999", "at most 2000 schemas"),
        ({"enum": list(range(1001))}, ".enum", "at most 1000 values"),
        (
            {"items": {"anyOf": [{"enum": list(range(501))}, {"enum": list(range(501))}]}},
            ".items.anyOf[1].enum",
            "1000",
        ),
        ({"enum": "a"}, ".enum", "must be a list"),
        ({"minItems": 10**9}, ".minItems", "from 0 to 100000"),
        ({"properties": {"a": {"maxLength": -1}}}, ".properties.a.maxLength", "from 0 to 100000"),
        ({"maxItems": 1.5}, ".maxItems", "whole number"),
        ({"maxItems": True}, ".maxItems", "whole number"),
        ({"maxItems": "3"}, ".maxItems", "whole number"),
        ({"$ref": "file:///etc/passwd"}, ".$ref", "a place in this schema"),
        ({"items": {"$ref": "http://example.com/s"}}, ".items.$ref", "a place in this schema"),
        ({"$ref": 3}, ".$ref", "a place in this schema"),
        ({"$dynamicRef": "other.json#x"}, ".$dynamicRef", "a place in this schema"),
        ({"type": "any"}, ".type", "one or more of array"),
        ({"type": ["string", "STRING"]}, ".type", "one or more of array"),
        ({"type": []}, ".type", "one or more of array"),
        ({"type": {"a": 1}}, ".type", "one or more of array"),
        ({"pattern": "a" * 513}, ".pattern", "at most 512 characters"),
        ({"pattern": r"(a)\1"}, ".pattern", "safe to run"),
        ({"pattern": "(?=a)"}, ".pattern", "look-around"),
        ({"pattern": 7}, ".pattern", "at most 512"),
        ({"pattern": "((a{100}){100}){100}"}, ".pattern", "safe to run"),
        ({"pattern": r"[\p{L}]{0,500}"}, ".pattern", "too large"),
        ({"patternProperties": {"(": {}}}, ".patternProperties", "safe to run"),
        ({"allOf": [either(2)] * 11}, "", "more than 1024 combinations"),
        ({"allOf": [{"$ref": "#/$defs/a"}] * 11, "$defs": {"a": either(2)}}, "", "more than 1024 combinations"),
        ({"properties": {"a": {"allOf": [either(33), either(33)]}}}, ".properties.a", "more than 1024 combinations"),
        ({"$ref": "#"}, "", "must not refer to itself"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "", "must not refer to itself"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"oneOf": [{"$ref": "#/$defs/a"}]}}},
            ".$defs.a",
            "must not refer to itself",
        ),
        (chained(200), ".$defs.d63", "64 references in a row"),
        # Not a JSON schema.
        ({"$ref": "#/$defs/nowhere"}, ".$ref", "does not have"),
        ({"items": {"$ref": "#/$defs/nowhere"}, "$defs": {}}, ".items.$ref", "does not have"),
        ({"$ref": "#anchor"}, ".$ref", "does not have"),
        ({"$ref": "#/prefixItems/99999999999999999999/x", "prefixItems": [{}]}, ".$ref", "does not have"),
        ({"$ref": "#/required", "required": ["a"]}, ".$ref", "does not have"),
        ({"$dynamicRef": "#node"}, ".$dynamicRef", "does not have"),
        ({"properties": {"a": {"not": {"$ref": "#/properties/a"}}}}, ".properties.a", "must not refer to itself"),
        ({"if": {"$recursiveRef": "#"}}, "", "must not refer to itself"),
        ({"$ref": "#/x", "x": {"required": 1}}, ".x.required", "JSON type array"),
        ({"$ref": "#/x", "x": {"pattern": "(?=a)"}}, ".x.pattern", "look-around"),
        ({"required": True}, ".required", "JSON type array"),
        ({"properties": {"a": {"required": "a"}}}, ".properties.a.required", "JSON type array"),
        ({"required": ["a", 1]}, ".required[1]", "JSON type string"),
        ({"properties": []}, ".properties", "JSON type object"),
        ({"properties": {"a": "string"}}, ".properties.a", "JSON type boolean or object"),
        ({"items": "string"}, ".items", "JSON type boolean or object"),
        ({"items": [{}, 3]}, ".items[1]", "JSON type boolean or object"),
        ({"additionalProperties": "no"}, ".additionalProperties", "JSON type boolean or object"),
        ({"anyOf": {}}, ".anyOf", "JSON type array"),
        ({"allOf": []}, ".allOf", "must not be empty"),
        ({"oneOf": [None]}, ".oneOf[0]", "JSON type boolean or object"),
        ({"enum": []}, ".enum", "must not be empty"),
        ({"minimum": "0"}, ".minimum", "JSON type number"),
        ({"multipleOf": 0}, ".multipleOf", "above 0"),
        ({"uniqueItems": "yes"}, ".uniqueItems", "JSON type boolean"),
        ({"$defs": [{}]}, ".$defs", "JSON type object"),
        ({"$defs": {"a": 1}}, ".$defs.a", "JSON type boolean or object"),
        ({"dependentRequired": {"a": "b"}}, ".dependentRequired.a", "JSON type array"),
        ({"description": 3}, ".description", "JSON type string"),
        ({"format": {}}, ".format", "JSON type string"),
        ({"$id": 3}, ".$id", "JSON type string"),
    ],
    ids=str,
)
def test_unsafe_schema_is_refused_with_its_path(schema: dict[str, Any], place: str, words: str) -> None:
    with pytest.raises(FieldError, match=words) as refused:
        require_safe_schema(schema, "tools[0].function.parameters", LIMITS)
    assert refused.value.field == f"tools[0].function.parameters{place}"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"properties": {"type": {"type": "string"}, "$ref": {"type": "null"}, "enum": {"type": "null"}}},
        {"type": ["string", "null"], "pattern": r"^\d{4}-\d{2}-\d{2}$"},
        {"pattern": "^[\\u00e9\\\\u]+$"},
        {"enum": ["a", 1, None, {"type": "whatever it likes"}]},
        {"const": {"$ref": "http://is.a/value"}},
        {"examples": [{"pattern": "(?=a)"}], "default": {"minItems": -1}},
        {"minItems": 0, "maxItems": 3.0, "maxLength": 100_000},
        {"properties": {"child": {"$ref": "#"}, "more": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
         "$defs": {"n": {"anyOf": [{"type": "null"}, {"properties": {"next": {"$ref": "#/$defs/n"}}}]}}},
        {"properties": {f"p{n}": {"anyOf": [{"type": "string"}, {"type": "null"}]} for n in range(100)}},
        {"pattern": "^(?!a)b$", "format": "email"},
        {"additionalProperties": False, "items": [{"type": "string"}, {"type": "integer"}]},
        deep(31),
        chained(50),
    ],
    ids=str,
)  # fmt: skip
def test_schemas_sent_by_clients_pass(schema: dict[str, Any]) -> None:
    require_safe_schema(schema, "schema", LIMITS)


def test_deeply_nested_schema_can_be_sent_to_the_mesh() -> None:
    schema = deep(20)
    require_safe_schema(schema, "schema", LIMITS)
    to_json_object(schema, "schema")


def test_schemas_of_one_request_are_counted_together() -> None:
    guard = SchemaGuard(SchemaLimits(max_total_bytes=100, max_patterns=2))
    guard.require_safe({"pattern": "a"}, "tools[0]")
    guard.require_safe({"pattern": "b"}, "tools[1]")
    with pytest.raises(FieldError, match="at most 2 patterns") as refused:
        guard.require_safe({"pattern": "c"}, "tools[2]")
    assert refused.value.field == "tools[2].pattern"
    with pytest.raises(FieldError, match="at most 100 bytes together"):
        guard.require_safe({"description": "x" * 80}, "tools[3]")


def test_pattern_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(FieldError, match="no text"):
        require_safe_pattern("\ud800", "pattern")


def test_unreachable_upper_bound_is_dropped_and_the_rest_is_unchanged() -> None:
    """Claude Code limits the text of a file to half a megabyte; such a schema was refused."""
    schema = {
        "type": "object",
        "properties": {
            "script": {"type": "string", "maxLength": 524_288, "minLength": 1},
            "maxLength": {"type": "string", "maxLength": 40},
            "lines": {"type": "array", "maxItems": 10**9, "items": {"type": "string"}},
        },
        "default": {"maxLength": 524_288},
        "enum": [{"maxItems": 10**9}],
    }
    kept = require_safe_schema(schema, "f", SchemaLimits())
    assert kept["properties"] == {
        "script": {"type": "string", "minLength": 1},
        "maxLength": {"type": "string", "maxLength": 40},
        "lines": {"type": "array", "items": {"type": "string"}},
    }
    assert (kept["default"], kept["enum"]) == (schema["default"], schema["enum"])
    assert schema["properties"]["script"]["maxLength"] == 524_288  # type: ignore[index]  # it is as it came
    bounded = {"maxLength": 100_000}
    assert require_safe_schema(bounded, "f", SchemaLimits()) is bounded


class Leaf(pydantic.BaseModel):
    kind: Literal["leaf"]
    mail: Annotated[str, pydantic.StringConstraints(pattern=r"^[^@]+@[^@]+$", max_length=80)]
    when: datetime | None = None
    price: Decimal
    pair: tuple[int, str] = (1, "a")


class Branch(pydantic.BaseModel):
    kind: Literal["branch"]
    parts: list[Annotated["Leaf | Branch", pydantic.Field(discriminator="kind")]]
    tags: set[str] = set()
    count: dict[str, int] = {}


@pytest.mark.parametrize("schema", CLIENT_SCHEMAS.values(), ids=CLIENT_SCHEMAS.keys())
def test_schemas_of_real_clients_and_every_draft_pass(schema: dict[str, Any]) -> None:
    require_safe_schema(schema, "schema", LIMITS)


def test_pydantic_schemas_pass() -> None:
    for model in (Leaf, Branch):
        require_safe_schema(model.model_json_schema(), "schema", LIMITS)


def test_look_ahead_pattern_beside_a_format_is_dropped_and_the_format_is_kept() -> None:
    schema = CLIENT_SCHEMAS["zod 4 by toJSONSchema"]
    kept = require_safe_schema(schema, "schema", LIMITS)
    assert kept["properties"]["mail"] == {"type": "string", "format": "email"}
    with pytest.raises(FieldError, match="look-around"):
        require_safe_schema({"pattern": "^(?!a)b$", "format": "a word of mine"}, "schema", LIMITS)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "string", "minLength": 9, "maxLength": 2}}}, ".properties.a.minLength"),
        ({"minItems": 3, "maxItems": 2, "items": {}}, ".minItems"),
        ({"items": {"minProperties": 3, "maxProperties": 2}}, ".items.minProperties"),
        ({"minContains": 3, "maxContains": 2}, ".minContains"),
        ({"anyOf": [{"type": "null"}, {"type": "number", "minimum": 3, "maximum": 2}]}, ".anyOf[1].minimum"),
        ({"exclusiveMinimum": 2, "maximum": 2}, ".exclusiveMinimum"),
        ({"minimum": 2, "maximum": 2, "exclusiveMaximum": True}, ".minimum"),
        ({"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3}, ".exclusiveMinimum"),
        ({"allOf": [{"minLength": 9}, {"maxLength": 2}]}, ""),
        ({"minLength": 9, "allOf": [{"allOf": [{"maxLength": 2}]}]}, ".minLength"),
        ({"minLength": 9, "$ref": "#/$defs/a", "$defs": {"a": {"maxLength": 2}}}, ".minLength"),
        ({"minLength": 9, "anyOf": [{"maxLength": 2}, {"maxLength": 3}]}, ".anyOf"),
        ({"$ref": "#/x/a", "x": {"a": {"minLength": 9, "maxLength": 2}}}, ".x.a.minLength"),
    ],
    ids=str,
)  # fmt: skip
def test_contradicting_bounds_are_refused(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(FieldError, match="contradict each other") as refused:
        require_safe_schema(schema, "s", LIMITS)
    assert refused.value.field in (f"s{place}", "s")


@pytest.mark.parametrize(
    "schema",
    [
        {"minLength": 2, "maxLength": 2},
        {"minLength": 9, "anyOf": [{"maxLength": 2}, {"maxLength": 30}]},
        {"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 3},
        {"minimum": 2, "exclusiveMinimum": False, "maximum": 2},
        {"properties": {"minLength": {"minLength": 9}, "maxLength": {"maxLength": 2}}},
        {"minimum": 10**400, "maximum": 10**401},
        {"items": {"$ref": "#"}, "minItems": 1, "maxItems": 2},
        {"minLength": 9, "not": {"maxLength": 2}},
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_bounds_with_a_value_between_them_pass(schema: dict[str, Any]) -> None:
    require_safe_schema(schema, "s", LIMITS)


def test_bounds_of_fanned_out_references_are_compared_in_linear_time() -> None:
    doubled = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(28)}
    require_safe_schema({"$ref": "#/$defs/d0", "$defs": {**doubled, "d28": {"minLength": 3}}}, "s", LIMITS)


EMAIL = "^(?!\\.)[a-z]+@[a-z]+$"


@pytest.mark.parametrize(
    ("part", "fitted"),
    [
        ({"type": "string", "pattern": EMAIL, "minLength": 2}, {"type": "string", "minLength": 2}),
        ({"$ref": "#/$defs/Lost", "description": "x"}, {"description": "x"}),
        ({"$ref": "https://example.com/s.json"}, {}),
        ({"$ref": 3}, {}),
        ({"type": "string", "enum": None}, {"type": "string"}),
        ({"enum": []}, {}),
        ({"enum": list(range(1001)), "type": "integer"}, {"type": "integer"}),
        ({"type": "any", "title": "x"}, {"title": "x"}),
        ({"type": []}, {}),
        (None, {}),
        ("string", {}),
        ([], {}),
        ({"items": None, "type": "array"}, {"items": {}, "type": "array"}),
        ({"anyOf": [{"type": "null"}, None]}, {"anyOf": [{"type": "null"}, {}]}),
        ({"anyOf": []}, {}),
        ({"type": "object", "properties": None}, {"type": "object"}),
        ({"type": "object", "required": True}, {"type": "object"}),
        ({"required": ["a", 1]}, {}),
        ({"minLength": "3", "maxLength": 4}, {"maxLength": 4}),
        ({"minLength": 9, "maxLength": 2, "type": "string"}, {"type": "string"}),
        ({"minLength": 9, "allOf": [{"maxLength": 2}]}, {"allOf": [{"maxLength": 2}]}),
        ({"anyOf": [{"$ref": "#/properties/a"}], "type": "string"}, {"type": "string"}),
        ({"patternProperties": {EMAIL: {}}}, {}),
        ({"additionalProperties": None}, {"additionalProperties": {}}),
        ({"multipleOf": 0}, {}),
        ({"pattern": EMAIL, "enum": None, "$ref": "#/x"}, {}),
    ],
    ids=str,
)
def test_invalid_part_of_a_tool_schema_is_dropped_and_the_rest_is_kept(part: object, fitted: object) -> None:
    schema = {"type": "object", "properties": {"a": part, "b": {"type": "string"}}, "required": ["b"]}
    kept, faults = SchemaGuard(LIMITS).fitted(schema, "t")
    assert faults
    assert all(fault.field.startswith("t.properties.a") for fault in faults)
    assert kept == {**schema, "properties": {"a": fitted, "b": {"type": "string"}}}
    require_safe_schema(kept, "t", LIMITS)


def test_tool_schema_too_deep_or_wide_keeps_what_fits() -> None:
    kept, faults = SchemaGuard(LIMITS).fitted({"properties": {"a": {"type": "string"}, "b": deep(40)}}, "t")
    assert kept["properties"]["a"] == {"type": "string"}
    assert "deeper" in faults[0].message
    require_safe_schema(kept, "t", LIMITS)


@pytest.mark.parametrize("flag", [True, False])
def test_boolean_schema_is_written_as_an_object(flag: bool) -> None:
    """Go's `any` becomes `true`, which llama.cpp refuses."""
    schema = {
        "properties": {"a": flag, "enum": flag},
        "items": flag,
        "anyOf": [flag, {"type": "null"}],
        "additionalProperties": flag,
        "default": {"items": flag},
    }
    written: dict[str, Any] = {} if flag else {"not": {}}
    assert require_safe_schema(schema, "s", LIMITS) == {
        "properties": {"a": written, "enum": written},
        "items": written,
        "anyOf": [written, {"type": "null"}],
        "additionalProperties": flag,
        "default": {"items": flag},
    }
