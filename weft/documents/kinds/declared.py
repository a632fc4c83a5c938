"""All kinds of resources that operators declare."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from weft.api.registry.v1.declaration_service_pb2 import Declaration
from weft.documents.kinds.agent import AGENT
from weft.documents.kinds.alias import ALIAS
from weft.documents.kinds.kind import DeclaredKind
from weft.documents.kinds.model import MODEL
from weft.documents.kinds.profile import PROFILE
from weft.documents.kinds.route import ROUTE
from weft.documents.kinds.tenant import TENANT
from weft.documents.kinds.workflow import WORKFLOW
from weft.documents.resource_kinds import ResourceKind

Key = tuple[ResourceKind, str]
"""The kind and the name of a resource."""
DECLARED_KINDS: Mapping[ResourceKind, DeclaredKind] = MappingProxyType(
    {each.kind: each for each in (MODEL, AGENT, ROUTE, ALIAS, PROFILE, WORKFLOW, TENANT)}
)


def kind_of(declaration: Declaration) -> ResourceKind | None:
    """Returns the kind of a declaration; None: it declares nothing."""
    word = declaration.WhichOneof("resource")
    return None if word is None else ResourceKind(word)


def declared_kind_of(declaration: Declaration) -> DeclaredKind | None:
    """Returns the description of what is declared; None: nothing, a runner or a pool."""
    kind = kind_of(declaration)
    return None if kind is None else DECLARED_KINDS.get(kind)


def manifest_of(declaration: Declaration) -> Any:
    """Returns what a declaration says of its resource, a message with a name."""
    word = declaration.WhichOneof("resource")
    if word is None:
        raise ValueError("an empty declaration")
    return declaration.model.manifest if word == "model" else getattr(declaration, word)


def key_of(record: Message) -> Key:
    """Returns the kind and the name of a record, such as an Alias."""
    stored: Any = record
    return _KINDS_OF_RECORDS[type(record)], stored.manifest.name


_KINDS_OF_RECORDS: Mapping[type[Message], ResourceKind] = MappingProxyType(
    {each.record: kind for kind, each in DECLARED_KINDS.items()}
)
