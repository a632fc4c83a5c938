"""What each kind of declared resource needs beside its module; a kind that lacks something fails here."""

from typing import Any

import pytest

from registry_svc.config import RegistryConfig
from weft.api.registry.v1.declaration_service_pb2 import Declaration
from weft.api.registry.v1.registry_service_pb2 import Change, Snapshot
from weft.documents.kinds.declared import DECLARED_KINDS, declared_kind_of, key_of, kind_of, manifest_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import DOCUMENT_TYPES, kind_number, observed_document, plain
from weft.documents.schemas import schemas

KINDS = pytest.mark.parametrize("kind", DECLARED_KINDS)


def record_of(kind: ResourceKind) -> Any:
    record: Any = DECLARED_KINDS[kind].record()
    record.manifest.name = "x"
    return record


@KINDS
def test_a_kind_is_declared_watched_and_shown_by_its_record(kind: ResourceKind) -> None:
    record = record_of(kind)
    document = observed_document(kind, record)
    given = Declaration(**{kind.value: document.declared})  # type: ignore[arg-type]  # the field of its kind
    assert (kind_of(given), declared_kind_of(given)) == (kind, DECLARED_KINDS[kind])
    assert (manifest_of(given).name, key_of(record)) == ("x", (kind, "x"))
    assert getattr(Change(**{kind.value: record}), kind.value) == record
    assert getattr(Change(**{f"deleted_{kind.value}": "x"}), f"deleted_{kind.value}") == "x"  # type: ignore[arg-type]
    snapshot = Snapshot()
    getattr(snapshot, kind.plural).append(record)
    assert snapshot.ByteSize()
    assert plain(document)["name"] == "x"


@KINDS
def test_a_kind_has_a_number_a_document_a_schema_and_a_limit(kind: ResourceKind) -> None:
    assert kind_number(kind)
    assert DOCUMENT_TYPES[kind].observed_type is DECLARED_KINDS[kind].record
    assert {f"{kind.value}.json", f"{kind.value}-list.json"} <= schemas().keys()
    assert RegistryConfig(database_url="sqlite://").max_of(kind) > 0


@KINDS
def test_the_references_of_a_kind_are_fields_of_its_manifest(kind: ResourceKind) -> None:
    manifest = record_of(kind).manifest
    for field in DECLARED_KINDS[kind].references:
        empty = getattr(manifest, field.name)
        setattr(manifest, field.name, "m-1") if isinstance(empty, str) else empty.append("m-1")
        assert [(each.field, each.target) for each in DECLARED_KINDS[kind].references_of(manifest)] == [(field, "m-1")]
        DECLARED_KINDS[kind].rename_references(manifest, lambda name: f"{name}-renamed")
        (found,) = DECLARED_KINDS[kind].references_of(manifest)
        assert found.target == "m-1-renamed"
        manifest.ClearField(field.name)
