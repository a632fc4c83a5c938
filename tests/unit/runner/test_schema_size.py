"""Schemas whose grammar would fill the memory are refused."""

import json
from typing import Any

import pytest

from runner_svc.engine_host.text_routes import MAX_REPETITIONS, MAX_SCHEMA_CHARS, schema_fault


@pytest.mark.parametrize(
    "schema",
    [
        {"minItems": 10**9},
        {"properties": {"a": [{"maxLength": 1e12}]}},
        {"pattern": "^a{1000000000}$"},
        {"pattern": "^a{1,99999999999999999999999999}$"},
        {"pattern": "^a{2001,}$"},
        {"description": "x" * MAX_SCHEMA_CHARS},
    ],
)
def test_schema_that_expands_endlessly_is_refused(schema: dict[str, Any]) -> None:
    assert schema_fault(json.dumps(schema))


def test_ordinary_schema_and_one_at_the_limit_pass() -> None:
    ordinary = {"properties": {"minItems": {"type": "integer", "minimum": 5000}}, "pattern": "^\\d{5}(-\\d{4})?$"}
    for schema in (ordinary, {"minItems": MAX_REPETITIONS}, {"minItems": "many", "pattern": 3}, True):
        assert schema_fault(json.dumps(schema)) == ""
