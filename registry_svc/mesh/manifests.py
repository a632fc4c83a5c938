"""Declarations as callers send them: checked, and brought to the canonical form in which they are stored.

What a value may be is said by the rules of its field (`weft.kernel.field_rules`), what concerns several fields by the
module of its kind in `weft.documents.kinds`; here is what concerns several documents and the limits of the registry.
Equal meanings are equal messages afterwards, and what a newer caller added is dropped.
"""

from collections.abc import Callable, Sequence

from registry_svc.config import RegistryConfig
from registry_svc.load_options import check_options
from registry_svc.wire_values import require_at_most
from weft.api.registry.v1 import declaration_service_pb2, profile_pb2
from weft.documents.kinds.declared import DECLARED_KINDS, declared_kind_of, kind_of, manifest_of
from weft.documents.kinds.profile import check_profile
from weft.documents.profiles import declarations_of, load_options_of, profile_field
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import invalid_field
from weft.kernel.field_rules import check_message


def valid_batch(
    request: declaration_service_pb2.ApplyRequest, config: RegistryConfig
) -> declaration_service_pb2.ApplyRequest:
    """Return a valid Apply, no two declarations of one name; raises INVALID_ARGUMENT naming the field."""
    require_at_most(request.declarations, "declarations", config.max_declarations)
    for index, declaration in enumerate(request.declarations):
        _check_declaration(declaration, f"declarations[{index}]", config)
        declaration.DiscardUnknownFields()
    require_at_most(request.expected, "expected", config.max_declarations)
    for index, expected in enumerate(request.expected):
        _check_declaration(expected, f"expected[{index}]", config)
    _require_one_namespace(request.declarations)
    return request


def _check_declaration(declaration: declaration_service_pb2.Declaration, field: str, config: RegistryConfig) -> None:
    kind = kind_of(declaration)
    if kind is None:
        raise invalid_field(
            field,
            "must be a model, an agent, a runner, a pool, a route, an alias, a profile, a workflow or a tenant",
        )
    where = f"{field}.{kind.value}"
    if kind is ResourceKind.PROFILE:
        valid_profile(declaration.profile, where, config)
    elif kind in DECLARED_KINDS:
        DECLARED_KINDS[kind].check(getattr(declaration, kind.value), where)
    elif kind is ResourceKind.POOL:
        require_at_most(declaration.pool.members, f"{where}.members", config.max_models)
    check_message(declaration, field)


def valid_profile(manifest: profile_pb2.ProfileManifest, field: str, config: RegistryConfig) -> None:
    """Bring a profile to its canonical form; raises INVALID_ARGUMENT naming the field, such as "agents[0].name"."""
    check_profile(manifest, field)
    documents = declarations_of(manifest)
    if len(documents) > config.max_profile_documents:
        raise invalid_field(field, f"declares {len(documents)} documents; at most {config.max_profile_documents}")
    _require_one_namespace(documents, lambda index: f"{field}.{profile_field(manifest, index)}")
    for index, load in enumerate(manifest.load):
        check_options(load_options_of(load.settings), f"{field}.load[{index}].settings")
    if manifest.ByteSize() > config.max_profile_bytes:
        raise invalid_field(field, f"must be at most {config.max_profile_bytes} bytes; it has {manifest.ByteSize()}")


def _declarations_field(index: int) -> str:
    return f"declarations[{index}]"


def _require_one_namespace(
    declarations: Sequence[declaration_service_pb2.Declaration], place: Callable[[int], str] = _declarations_field
) -> None:
    """No two of one name in one call; only a pool may be called like a model. `place`: the field of one of them."""
    owners: dict[tuple[ResourceKind | None, str], int] = {}
    pools = {each.pool.name for each in declarations if each.HasField("pool")}
    pools |= {each.model.manifest.pool_name for each in declarations if each.HasField("model")}
    for index, declaration in enumerate(declarations):
        name, kind = manifest_of(declaration).name, kind_of(declaration)
        declared = declared_kind_of(declaration)
        has_own_space = kind is ResourceKind.POOL or (declared is not None and not declared.shares_namespace)
        space = kind if has_own_space else None
        earlier = owners.setdefault((space, name), index)
        if earlier != index:
            what = "also declared in this call" if kind is ResourceKind.POOL else f"also that of {place(earlier)}"
            raise invalid_field(place(index), f"its name is {what}")
        if not space and name in pools and kind is not ResourceKind.MODEL:
            raise invalid_field(place(index), "its name is also that of a pool in this call")
