"""`/api/v1/keys`: list, create, rotate and revoke API keys.

If callers need no keys, keys are changed only on the home's socket, so that only the home's user can prepare keys.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import json_response
from gateway.auth.authentication import HOME_SOCKET
from gateway.deps import Gateway, GatewayDeps
from gateway.intake.query import begin_change, begin_read
from gateway.operation_client import read_body
from gateway.registry_client import RegistryService
from gateway.request_facts import facts_of
from gateway.resources.resource_handlers import SURFACE
from gateway.routing import collaborator
from weft.api.registry.v1 import key_service_pb2 as key_pb
from weft.documents.codec import document_of
from weft.documents.computed import key_state
from weft.documents.document_base import DocumentPart
from weft.kernel.access.principal import DEFAULT_SCOPES, MAX_SCOPES, Access, Resource, Role, parse_scopes
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.names import MAX_TENANT_CHARS, require_name

_MAKE = Access(Resource.KEYS, Role.CREATE)

log = get_logger("weft.gateway")

MAX_DESCRIPTION_CHARS = 128
MAX_SCOPE_CHARS = 64
MIN_LIFETIME_SECONDS = 60
MAX_LIFETIME_SECONDS = 10 * 366 * 86_400
MAX_GRACE_SECONDS = 30 * 86_400


class NewKeyBody(DocumentPart):
    """The properties of a new key."""

    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] = ""
    """Purpose of the key; one line."""
    tenant: Annotated[str, Field(max_length=MAX_TENANT_CHARS)] = ""
    """The tenant of its requests. Empty: `default`."""
    scopes: Annotated[
        tuple[Annotated[str, Field(max_length=MAX_SCOPE_CHARS)], ...], Field(max_length=MAX_SCOPES, strict=False)
    ] = ()
    """The access that it grants; empty: `inference:create`, `inference:edit` and `models:view`. The caller must have
    each scope.
    """
    lifetime_seconds: Annotated[int, Field(ge=MIN_LIFETIME_SECONDS, le=MAX_LIFETIME_SECONDS)] | None = None
    """How long the key is valid. Absent: no limit."""
    max_priority: Literal["high", "normal", "low"] | None = None
    """Highest priority class of its requests: one that asks for more waits in this class. Absent: that of the caller's
    key."""


class RotateBody(DocumentPart):
    """Options of a key rotation."""

    grace_seconds: Annotated[int, Field(ge=0, le=MAX_GRACE_SECONDS)] | None = None
    """How long the old secret stays valid. Absent: the setting of the registry, one hour by default."""


Keys = Annotated[RegistryService, collaborator("keys")]


def _require_changeable(deps: GatewayDeps, request: Request) -> None:
    """Raises NOT_FOUND if callers need no keys, except on the home's socket."""
    if not (deps.gate.needs_keys or request.scope.get(HOME_SOCKET)):
        raise WeftError(
            Reason.NOT_FOUND,
            "API keys cannot be changed here, because callers need none; use weft keys on the mesh's home",
        )


async def list_keys(deps: Gateway, keys: Keys, request: Request) -> Response:
    """Lists all keys without their secrets, newest first."""
    begin_read(request, SURFACE)
    found: key_pb.ListKeysResponse = await keys.ListKeys(key_pb.ListKeysRequest())
    document = document_of(found)
    for item, key in zip(document["items"], found.keys, strict=True):
        item["state"] = key_state(key, deps.clock.utc_now())
    return json_response(document)


async def revoke_key(deps: Gateway, keys: Keys, request: Request) -> Response:
    """Revokes a key immediately, on every gateway and router."""
    _require_changeable(deps, request)
    begin_change(request, SURFACE)
    key_id = _id_of(request)
    await keys.RevokeKey(key_pb.RevokeKeyRequest(id=key_id))
    _audit("key revoked", request, key_id)
    return Response(status_code=204)


async def create_key(deps: Gateway, keys: Keys, request: Request) -> Response:
    """Creates a key. Its secret is shown only in this answer."""
    _require_changeable(deps, request)
    wanted = await read_body(request, deps.config, NewKeyBody, SURFACE, optional=True)
    _require_scopes(request, wanted.scopes or DEFAULT_SCOPES)
    principal = facts_of(request.scope).principal
    ceiling = Priority[wanted.max_priority.upper()] if wanted.max_priority else principal.max_priority
    principal.require_priority(ceiling)
    creation = key_pb.CreateKeyRequest(
        description=wanted.description,
        tenant=wanted.tenant,
        scopes=wanted.scopes,
        max_priority=ceiling.as_ceiling,  # type: ignore[arg-type]  # same numbers
    )
    if wanted.lifetime_seconds is not None:
        creation.lifetime.FromSeconds(wanted.lifetime_seconds)
    made: key_pb.CreateKeyResponse = await keys.CreateKey(creation)
    _audit("key made", request, made.key.id)
    return _shown_once(deps, key_pb.RotateKeyResponse(key=made.key, text=made.text), 201)


async def rotate_key(deps: Gateway, keys: Keys, request: Request) -> Response:
    """Replaces the secret of a key. The new one is only in this answer; the old one is valid for a grace period."""
    _require_changeable(deps, request)
    wanted = await read_body(request, deps.config, RotateBody, SURFACE, optional=True)
    # The caller receives the new secret, so it must be allowed to create keys, and the key may have no scope that the
    # caller lacks. Scopes of a key never change.
    facts_of(request.scope).principal.require(_MAKE)
    key_id = _id_of(request)
    known: key_pb.ListKeysResponse = await keys.ListKeys(key_pb.ListKeysRequest())
    present = next((key for key in known.keys if key.id == key_id), None)
    if present is None:
        raise WeftError(Reason.NOT_FOUND, "there is no valid key with this id")
    _require_scopes(request, present.scopes)
    facts_of(request.scope).principal.require_priority(Priority.ceiling(present.max_priority))
    rotation = key_pb.RotateKeyRequest(id=key_id)
    if wanted.grace_seconds is not None:
        rotation.grace.FromSeconds(wanted.grace_seconds)
    rotated: key_pb.RotateKeyResponse = await keys.RotateKey(rotation)
    _audit("key rotated", request, key_id)
    return _shown_once(deps, rotated, 200)


def _require_scopes(request: Request, scopes: Iterable[str]) -> None:
    """Raises PERMISSION_DENIED for a scope that the caller lacks. The registry only sees the gateway's own key."""
    principal = facts_of(request.scope).principal
    for access in sorted(parse_scopes(scopes, "scopes") - principal.access, key=str):
        principal.require(access)


def _id_of(request: Request) -> str:
    return require_name(request.path_params["id"], "id")


def _audit(event: str, request: Request, key_id: str) -> None:
    facts = facts_of(request.scope)
    log.info(event, request_id=facts.request_id, id=key_id, by=facts.principal.name)


def _shown_once(deps: GatewayDeps, new: key_pb.RotateKeyResponse, status: int) -> Response:
    document = document_of(new) | {"state": key_state(new.key, deps.clock.utc_now())}
    response = json_response(document, status)
    response.headers["cache-control"] = "no-store"
    return response
