"""The kinds of resources, one module each, and the messages that carry a resource of any kind.

A module is added by defining `KIND`; no other code lists it.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.documents.kind import DeclaredKind, Kind
from weft.documents.resource_kinds import ResourceKind

Key = tuple[ResourceKind, str]
"""The kind and the name of a resource."""
KINDS: Mapping[ResourceKind, Kind] = MappingProxyType(
    {kind: import_module(f"{__name__}.{kind.value}").KIND for kind in ResourceKind}
)
DECLARED_KINDS: Mapping[ResourceKind, DeclaredKind] = MappingProxyType(
    {kind: each for kind, each in KINDS.items() if isinstance(each, DeclaredKind)}
)


def name_in(message: Any) -> str:
    """Returns the name in a declaration or a record."""
    return str(message.manifest.name if "manifest" in message.DESCRIPTOR.fields_by_name else message.name)


def key_of(record: Message) -> Key:
    """Returns the kind and the name of a record, such as an Alias."""
    return _KINDS_OF_RECORDS[type(record)], name_in(record)


def packed(kind: ResourceKind, message: Message) -> ResourceDocument:
    """Returns a declaration or a record as the message that carries any kind."""
    resource = ResourceDocument(kind=kind.value, name=name_in(message))
    resource.content.Pack(message, deterministic=True)
    return resource


def record_in(resource: ResourceDocument) -> Any:
    """Returns the record in a message, such as an Alias; None: this version does not know its kind."""
    if resource.kind not in KINDS:
        return None
    record = KINDS[ResourceKind(resource.kind)].record()
    return record if resource.content.Unpack(record) else None


_KINDS_OF_RECORDS: Mapping[type[Message], ResourceKind] = MappingProxyType(
    {each.record: kind for kind, each in KINDS.items()}
)
