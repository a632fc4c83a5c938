"""What callers ask of API keys, from the wire to the domain. Each raises INVALID_ARGUMENT naming the field."""

from datetime import timedelta

from registry_svc.checks import require_text
from registry_svc.config import KeysConfig
from registry_svc.keys.domain import KeyWish
from registry_svc.mesh.declaration_requests import to_lifetime
from weft.api.registry.v1 import key_service_pb2 as pb
from weft.kernel.errors import invalid_field
from weft.kernel.names import DEFAULT_TENANT, MAX_TENANT_CHARS, require_token
from weft.kernel.principal import DEFAULT_SCOPES, parse_scopes

MAX_DESCRIPTION_CHARS = 128


def to_wish(request: pb.CreateKeyRequest) -> KeyWish:
    """A valid CreateKey."""
    parse_scopes(request.scopes, "scopes")
    return KeyWish(
        description=require_text(request.description, "description", MAX_DESCRIPTION_CHARS),
        tenant=require_token(request.tenant or DEFAULT_TENANT, "tenant", MAX_TENANT_CHARS),
        scopes=tuple(dict.fromkeys(request.scopes)) or DEFAULT_SCOPES,
        lifetime=to_lifetime(request.lifetime) if request.HasField("lifetime") else None,
    )


def to_grace(request: pb.RotateKeyRequest, config: KeysConfig) -> timedelta | None:
    """How long the old secret stays good; None: the caller does not say."""
    if not request.HasField("grace"):
        return None
    seconds = request.grace.seconds + request.grace.nanos / 1e9
    if not 0 <= seconds <= config.max_grace_seconds:
        raise invalid_field("grace", f"must be 0 to {config.max_grace_seconds:.0f} seconds, or not set")
    return timedelta(seconds=seconds)
