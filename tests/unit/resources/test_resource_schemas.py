"""What the code prints conforms to the published schemas, and the reference lists every field."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from kit.resource_samples import some_agent, some_event, some_model, some_pool, some_route, some_runner
from reference_pages.field_tables import page

from weft.documents.codec import document_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import (
    declared,
    instance_of,
    model_document,
    observed_document,
    plain,
    pool_document,
    runner_document,
)
from weft.documents.schemas import schemas

PRINTED: dict[str, dict[str, Any]] = {
    "model": plain(model_document(some_model(), instance_of(some_model(), some_runner()))),
    "agent": plain(observed_document(ResourceKind.AGENT, some_agent())),
    "runner": plain(runner_document(some_runner())),
    "pool": plain(pool_document(some_pool())),
    "route": plain(observed_document(ResourceKind.ROUTE, some_route())),
    "event": document_of(some_event()),
}


@pytest.mark.parametrize("kind", PRINTED)
def test_printed_document_matches_its_schema(kind: str) -> None:
    validator = Draft202012Validator(schemas()[f"{kind}.json"])
    validator.validate(PRINTED[kind])
    with pytest.raises(ValidationError):
        validator.validate({**PRINTED[kind], "unheardOf": 1})
    list_kind = f"{kind.capitalize()}List"
    Draft202012Validator(schemas()[f"{kind}-list.json"]).validate({"kind": list_kind, "items": [PRINTED[kind]]})


def test_yaml_declaration_matches_the_same_schema() -> None:
    Draft202012Validator(schemas()["model.json"]).validate(declared(model_document(some_model())))
    Draft202012Validator(schemas()["agent.json"]).validate(
        declared(observed_document(ResourceKind.AGENT, some_agent()))
    )
    Draft202012Validator(schemas()["route.json"]).validate(
        declared(observed_document(ResourceKind.ROUTE, some_route()))
    )


def _fields(schema: dict[str, Any]) -> set[str]:
    """Every field of a schema and of what it refers to, but for those that conditions have."""
    parts = [schema, *(part for name, part in schema.get("$defs", {}).items() if name != "Condition")]
    return {field for part in parts for field in part.get("properties", {})} - {"kind", "status", "type"}


@pytest.mark.parametrize("kind", PRINTED)
def test_every_field_is_documented(kind: str) -> None:
    text = page()
    assert not {field for field in _fields(schemas()[f"{kind}.json"]) if field not in text}
