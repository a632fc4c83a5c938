"""Validation of declarations, and their canonical form for storage, in which equal meanings are equal messages.

Field rules (`weft.kernel.field_rules`) check single values, modules of `weft.documents.kinds` several fields; this
module checks several documents and the registry's limits. Unknown fields of newer callers are dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from registry_svc.config import RegistryConfig
from registry_svc.load_options import check_options
from registry_svc.wire_values import require_at_most
from weft.api.registry.v1 import declaration_service_pb2, profile_pb2
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.documents.kinds import DECLARED_KINDS
from weft.documents.kinds.profile import check_profile
from weft.documents.profiles import documents_of, load_options_of, profile_field
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument, declared_document
from weft.kernel.errors import invalid_field
from weft.kernel.field_rules import check_message


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A valid Apply."""

    documents: Sequence[AnyDocument]
    expected: Sequence[AnyDocument] = ()
    dry_run: bool = False
    adopt: bool = False


def valid_batch(request: declaration_service_pb2.ApplyRequest, config: RegistryConfig) -> Batch:
    """Returns a valid Apply, with unique names. Raises INVALID_ARGUMENT naming the field."""
    batch = Batch(
        documents=_valid_documents(request.declarations, "declarations", config),
        expected=_valid_documents(request.expected, "expected", config),
        dry_run=request.dry_run,
        adopt=request.adopt,
    )
    _require_one_namespace(batch.documents)
    return batch


def _valid_documents(
    resources: Sequence[ResourceDocument], field: str, config: RegistryConfig
) -> Sequence[AnyDocument]:
    require_at_most(resources, field, config.max_declarations)
    return [_valid_document(resource, f"{field}[{index}]", config) for index, resource in enumerate(resources)]


def _valid_document(resource: ResourceDocument, field: str, config: RegistryConfig) -> AnyDocument:
    document = declared_document(resource, field)
    kind, where = document.kind, f"{field}.{document.kind.value}"
    document.declared.DiscardUnknownFields()
    if kind is ResourceKind.PROFILE:
        valid_profile(document.declared, where, config)
    elif kind in DECLARED_KINDS:
        DECLARED_KINDS[kind].check(document.declared, where)
    elif kind is ResourceKind.POOL:
        require_at_most(document.declared.members, f"{where}.members", config.max_models)
    check_message(document.declared, where)
    return document


def valid_profile(manifest: profile_pb2.ProfileManifest, field: str, config: RegistryConfig) -> None:
    """Brings a profile to its canonical form. Raises INVALID_ARGUMENT naming the field, such as "agents[0].name"."""
    check_profile(manifest, field)
    documents = documents_of(manifest)
    if len(documents) > config.max_profile_documents:
        raise invalid_field(field, f"declares {len(documents)} documents; at most {config.max_profile_documents}")
    _require_one_namespace(documents, lambda index: f"{field}.{profile_field(manifest, index)}")
    for index, load in enumerate(manifest.load):
        check_options(load_options_of(load.settings), f"{field}.load[{index}].settings")
    if manifest.ByteSize() > config.max_profile_bytes:
        raise invalid_field(field, f"must be at most {config.max_profile_bytes} bytes; it has {manifest.ByteSize()}")


def _declarations_field(index: int) -> str:
    return f"declarations[{index}]"


def _require_one_namespace(documents: Sequence[AnyDocument], place: Callable[[int], str] = _declarations_field) -> None:
    """Raises INVALID_ARGUMENT for two documents with one name, except pool and model. `place` returns a field name."""
    owners: dict[tuple[ResourceKind | None, str], int] = {}
    pools = {each.name for each in documents if each.kind is ResourceKind.POOL}
    pools |= {each.manifest.pool_name for each in documents if each.kind is ResourceKind.MODEL}
    for index, document in enumerate(documents):
        name, kind = document.name, document.kind
        declared = DECLARED_KINDS.get(kind)
        has_own_space = kind is ResourceKind.POOL or (declared is not None and not declared.shares_namespace)
        space = kind if has_own_space else None
        earlier = owners.setdefault((space, name), index)
        if earlier != index:
            what = "also declared in this call" if kind is ResourceKind.POOL else f"also that of {place(earlier)}"
            raise invalid_field(place(index), f"its name is {what}")
        if not space and name in pools and kind is not ResourceKind.MODEL:
            raise invalid_field(place(index), "its name is also that of a pool in this call")
