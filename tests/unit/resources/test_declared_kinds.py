"""What each kind of declared resource offers everywhere."""

from typing import Any

import pytest

from registry_svc.registry_config import RegistryConfig
from weft.documents.kinds import DECLARED_KINDS, key_of, packed, record_in
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import declared_document, observed_document, plain, to_declaration
from weft.documents.schemas import schemas

KINDS = pytest.mark.parametrize("kind", DECLARED_KINDS)


def record_of(kind: ResourceKind) -> Any:
    record: Any = DECLARED_KINDS[kind].record()
    record.manifest.name = "x"
    return record


@KINDS
def test_kind_is_declared_and_shown_by_its_record(kind: ResourceKind) -> None:
    record = record_of(kind)
    document = observed_document(kind, record)
    assert declared_document(to_declaration(document)).declared == document.declared
    assert (key_of(record), document.name, plain(document)["name"]) == ((kind, "x"), "x", "x")
    assert record_in(packed(kind, record)) == record


@KINDS
def test_kind_has_a_schema_and_a_limit(kind: ResourceKind) -> None:
    assert {f"{kind.value}.json", f"{kind.value}-list.json"} <= schemas().keys()
    assert RegistryConfig(database_url="sqlite://").max_of(kind) > 0


@KINDS
def test_references_of_a_kind_are_fields_of_its_manifest(kind: ResourceKind) -> None:
    manifest = record_of(kind).manifest
    for field in DECLARED_KINDS[kind].references:
        empty = getattr(manifest, field.name)
        setattr(manifest, field.name, "m-1") if isinstance(empty, str) else empty.append("m-1")
        assert [(each.field, each.target) for each in DECLARED_KINDS[kind].references_of(manifest)] == [(field, "m-1")]
        DECLARED_KINDS[kind].rename_references(manifest, lambda name: f"{name}-renamed")
        (found,) = DECLARED_KINDS[kind].references_of(manifest)
        assert found.target == "m-1-renamed"
        manifest.ClearField(field.name)
