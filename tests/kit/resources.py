"""Resources of all kinds in the messages that carry them."""

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from weft.api.registry.v1.registry_service_pb2 import Change, ListResourcesResponse, Snapshot
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.documents.kinds import key_of, packed, record_in
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import declared_document


def declared(**one: Message) -> ResourceDocument:
    """Returns the declaration of a resource given by kind, such as `alias=AliasManifest(...)`."""
    ((kind, message),) = one.items()
    return packed(ResourceKind(kind), message)


def manifest_in(resource: ResourceDocument) -> Any:
    """Returns the manifest in a declaration."""
    return declared_document(resource).manifest


def carried(record: Message) -> ResourceDocument:
    return packed(key_of(record)[0], record)


def put(record: Message) -> Change:
    return Change(resource=carried(record))


def gone(kind: str, name: str) -> Change:
    return Change(deleted_resource=ResourceDocument(kind=kind, name=name))


def snapshot(*records: Message, **others: Any) -> Snapshot:
    return Snapshot(resources=map(carried, records), **others)


def page(records: Iterable[Message], next_page_token: str = "") -> ListResourcesResponse:
    return ListResourcesResponse(resources=map(carried, records), next_page_token=next_page_token)


def records(resources: Iterable[ResourceDocument], kind: str = "") -> list[Any]:
    """Returns the records in resources, optionally of one kind."""
    return [record_in(each) for each in resources if kind in ("", each.kind)]
