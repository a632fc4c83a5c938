"""The published schemas are those of the code, and what the code prints holds to them."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from resource_samples import some_agent, some_event, some_model, some_pool, some_route, some_runner

from weft.documents.codec import document_of
from weft.documents.field_tables import PAGE, page
from weft.documents.resources import (
    agent_document,
    declared,
    instance_of,
    model_document,
    plain,
    pool_document,
    route_document,
    runner_document,
)
from weft.documents.schemas import schemas, text_of, write

FOLDER = Path(__file__).parents[3] / "docs" / "schemas"

PRINTED: dict[str, dict[str, Any]] = {
    "model": plain(model_document(some_model(), instance_of(some_model(), some_runner()))),
    "agent": plain(agent_document(some_agent())),
    "runner": plain(runner_document(some_runner())),
    "pool": plain(pool_document(some_pool())),
    "route": plain(route_document(some_route())),
    "event": document_of(some_event()),
}


def test_the_published_schemas_are_those_of_the_code() -> None:
    published = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.json")}
    expected = {name: text_of(schema) for name, schema in schemas().items()}
    assert published == expected, "run python -m weft.documents.schemas"


def test_the_tables_of_fields_are_those_of_the_code() -> None:
    assert (FOLDER.parent / PAGE).read_text("utf-8") == page(), "run make docs"


def test_the_writer_writes_what_is_published(tmp_path: Path) -> None:
    write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(schemas())


@pytest.mark.parametrize("kind", PRINTED)
def test_what_is_printed_holds_to_its_schema(kind: str) -> None:
    validator = Draft202012Validator(schemas()[f"{kind}.json"])
    validator.validate(PRINTED[kind])
    with pytest.raises(ValidationError):
        validator.validate({**PRINTED[kind], "unheardOf": 1})
    list_kind = f"{kind.capitalize()}List"
    Draft202012Validator(schemas()[f"{kind}-list.json"]).validate({"kind": list_kind, "items": [PRINTED[kind]]})


def test_what_yaml_declares_holds_to_the_same_schema() -> None:
    Draft202012Validator(schemas()["model.json"]).validate(declared(model_document(some_model())))
    Draft202012Validator(schemas()["agent.json"]).validate(declared(agent_document(some_agent())))
    Draft202012Validator(schemas()["route.json"]).validate(declared(route_document(some_route())))


def _fields(schema: dict[str, Any]) -> set[str]:
    """Every field of a schema and of what it refers to, but for those that conditions have."""
    parts = [schema, *(part for name, part in schema.get("$defs", {}).items() if name != "Condition")]
    return {field for part in parts for field in part.get("properties", {})} - {"kind", "status", "type"}


@pytest.mark.parametrize("kind", PRINTED)
def test_every_field_is_documented(kind: str) -> None:
    page = (FOLDER.parent / "document-fields.md").read_text("utf-8")
    assert not {field for field in _fields(schemas()[f"{kind}.json"]) if field not in page}
