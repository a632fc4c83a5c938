import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.failures import fails

from runner_svc.chat.offered_tools import MAX_SENT_DEPTH
from runner_svc.tools import schemas
from runner_svc.tools.schemas import MAX_ARGUMENT_BYTES, ArgumentCheck, object_schema
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

KEYWORDS = [
    *("type", "properties", "items", "required", "enum", "anyOf", "allOf", "not", "$ref", "$defs", "a", "pattern"),
    *("minimum", "maxLength", "multipleOf", "uniqueItems", "additionalProperties", "const", "prefixItems", "contains"),
]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0},
        "mood": {"enum": ["good", "bad"]},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "friend": {"$ref": "#"},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def parse(text: str, schema: dict[str, Any] = PERSON) -> dict[str, Any]:
    return ArgumentCheck("person", object_schema(schema)).parse(text)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "Ada"}', {"name": "Ada"}),
        (
            ' {"name": "Ada", "age": 36, "mood": "good", "tags": ["a", "b"]} ',
            {"name": "Ada", "age": 36, "mood": "good", "tags": ["a", "b"]},
        ),
        ('{"name": "Ada", "friend": {"name": "Eve"}}', {"name": "Ada", "friend": {"name": "Eve"}}),
    ],
)
def test_valid_arguments_are_returned(text: str, arguments: dict[str, Any]) -> None:
    assert parse(text) == arguments


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"name": "Ada"', "not JSON"),
        ("Ada", "not JSON"),
        ('{"name": NaN}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"name": "Ada", "age": 1' + "0" * 5000 + "}", "not JSON"),
        ("[1]", "not a JSON object"),
        ('"name"', "not a JSON object"),
        ("{}", "'name' is a required property"),
        ('{"name": 1}', "$.name"),
        ('{"name": "Ada", "age": -1}', "$.age"),
        ('{"name": "Ada", "age": "36"}', "$.age"),
        ('{"name": "Ada", "mood": "so-so"}', "$.mood"),
        ('{"name": "Ada", "tags": ["a", "a"]}', "not all different"),
        ('{"name": "Ada", "other": 1}', "'other' was unexpected"),
        ('{"name": "Ada", "friend": {"name": "Eve", "age": "x"}}', "$.friend.age"),
        ('{"name": "' + "x" * MAX_ARGUMENT_BYTES + '"}', "more than"),
    ],
)
def test_invalid_arguments_are_refused_with_their_position(text: str, says: str) -> None:
    with fails(Reason.TOOL_CALL_INVALID) as caught:
        parse(text)
    assert says in caught.value.message
    assert caught.value.metadata == {"tool": "person"}
    assert len(caught.value.message) < 1000


def test_empty_text_means_no_arguments() -> None:
    assert parse("", {}) == parse(" ", {}) == parse("{}", {}) == {}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"name": {"pattern": "^(a+)+!$"}}},
        {"patternProperties": {"^(a+)+$": {"type": "integer"}}},
        {"properties": {"name": {"pattern": "^(?=b)"}}},
        {"properties": {"name": {"type": "string"}}, "unevaluatedProperties": False},
    ],
)
def test_untrusted_patterns_run_in_linear_time_and_unsafe_ones_never(schema: dict[str, Any]) -> None:
    # With Python's `re` the first would take longer than the age of the universe.
    text = '{"name": "' + "a" * 100 + '!"}'
    assert parse(text, schema)["name"].startswith("aaa")


def test_patterns_of_arguments_are_enforced() -> None:
    for schema in ({"properties": {"name": {"pattern": "^(a+)+$"}}}, {"patternProperties": {"^n": {"type": "null"}}}):
        with fails(Reason.TOOL_CALL_INVALID, "$.name"):
            parse('{"name": "' + "a" * 100 + '!"}', schema)


def test_schema_with_exponential_references_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "MAX_CHECK_CPU_SECONDS", 0.01)
    levels = {f"l{n}": {"allOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(20)}
    schema = {"$defs": {**levels, "l20": {}}, "$ref": "#/$defs/l0"}
    with pytest.raises(WeftError, match="too many steps"):
        parse("{}", schema)


def test_many_comparisons_with_a_long_list_end_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "MAX_CHECK_CPU_SECONDS", 0.01)
    schema = {"properties": {"a": {"items": {"not": {"enum": list(range(9000))}}}}}
    with pytest.raises(WeftError, match="too many steps"):
        parse(f'{{"a": {[-1.5] * 10_000}}}', schema)


def test_circular_schema_is_an_error_and_not_a_crash() -> None:
    with fails(Reason.TOOL_CALL_INVALID, match="too many steps"):
        ArgumentCheck("person", {"allOf": [{"$ref": "#"}]}).parse('{"a": 1}')


@pytest.mark.parametrize("frames_below", range(12))
def test_deep_arguments_for_a_recursive_schema_end_in_an_error_and_not_a_panic(frames_below: int) -> None:
    # Where Python's limit on depth is met inside the library's Rust parts, they raise what no `except Exception` holds.
    # Which part it is depends on how deep the stack was before.
    nested = {"type": "array", "items": {"$ref": "#/$defs/nested"}}
    schema = {"$defs": {"nested": nested}, "properties": {"a": {"$ref": "#/$defs/nested"}}}

    def parse_below(frames: int) -> None:
        if frames:
            parse_below(frames - 1)
        else:
            parse(f'{{"a": {"[" * 900}{"]" * 900}}}', schema)

    with fails(Reason.TOOL_CALL_INVALID, match="too many steps"):
        parse_below(frames_below)


def test_deepest_serializable_arguments_can_be_validated_against_a_recursive_schema() -> None:
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    text = '{"next": ' * MAX_SENT_DEPTH + "null" + "}" * MAX_SENT_DEPTH
    assert parse(text, {"$defs": {"node": node}, **node})["next"]


def test_lone_surrogate_in_a_name_is_not_in_the_error() -> None:
    with pytest.raises(WeftError) as caught:
        parse('{"\\ud800": 1}', {"additionalProperties": {"type": "string"}})
    assert caught.value.message.encode()


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": 5}, r"schema\.properties: "),
        ({"properties": {"a": 5}}, r"properties\.a: "),
        ({"properties": {"a": {"type": "strange"}}}, r"\.type"),
        ({"properties": {"a": {"type": 5}}}, r"\.type"),
        ({"properties": {"a": {"type": []}}}, r"\.type"),
        ({"properties": {"a": {"minimum": "x"}}}, r"\.minimum"),
        ({"properties": {"a": {"minLength": -1}}}, r"\.minLength"),
        ({"properties": {"a": {"maxItems": 1.5}}}, r"\.maxItems"),
        ({"properties": {"a": {"enum": "x"}}}, r"\.enum"),
        ({"properties": {"a": {"items": [{"type": "string"}]}}}, r"properties\.a\.items: "),
        ({"properties": {"a": {"anyOf": []}}}, r"\.anyOf"),
        ({"properties": {"a": {"pattern": 5}}}, r"\.pattern"),
        ({"required": 5}, r"\.required"),
        ({"required": [5]}, r"\.required"),
        ({"$ref": 5}, r"\.\$ref: "),
        ({"properties": {"a": {"$ref": "#/$defs/nothing"}}}, "does not have"),
        ({"properties": {"a": {"$ref": "#/required/0"}}, "required": ["a"]}, "does not have"),
        ({"allOf": [{"$ref": "#"}]}, "must not refer to itself"),
        ({"additionalProperties": "no"}, r"\.additionalProperties: "),
        ({"properties": {"a": {"maximum": float("inf")}}}, "not JSON compliant"),
        ({"properties": {"a": {"maximum": 10**400}}}, "beyond the range"),
        ({"description": "x" * 70_000}, "more than 65536 bytes"),
        (_deep(40), "levels deep"),
        ({"type": "array"}, "not that of an object"),
        ({"type": ["object", "null"]}, "not that of an object"),
        ({"properties": {"a": {"$ref": "https://example.org/x.json"}}}, "never fetched"),
        ({"properties": {"a": {"anyOf": [{"$ref": "other.json#/x"}]}}}, "never fetched"),
        ({"$dynamicRef": "http://127.0.0.1:9/"}, "never fetched"),
    ],
)
def test_invalid_or_unusable_schema_is_refused_before_a_model_gets_it(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        object_schema(schema)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), JSON, max_size=5), JSON)
def test_any_schema_and_arguments_raise_only_the_two_expected_errors(schema: dict[str, Any], arguments: Any) -> None:
    try:
        sound = object_schema(schema)
    except ValueError:
        return
    with suppress(WeftError):
        assert isinstance(ArgumentCheck("t", sound).parse(json.dumps(arguments)), dict)


def test_empty_schema_becomes_an_object_schema_and_a_property_may_be_named_ref() -> None:
    assert object_schema({}) == {"type": "object", "properties": {}}
    assert object_schema({"properties": {"$ref": {"type": "string"}}})["properties"] == {"$ref": {"type": "string"}}
