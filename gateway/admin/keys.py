"""`/api/v1/keys`: list, create, rotate and revoke API keys. Absent where callers need no keys."""

from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.operations import read_optional_body
from gateway.admin.ports import KeysPort, NewKeyBody, RotateBody
from gateway.answers.unary import json_response
from gateway.deps import GatewayDeps
from gateway.intake.query import begin_change, begin_read
from gateway.request_facts import facts_of
from gateway.resources.handlers import SURFACE
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.names import require_name
from weft.kernel.principal import DEFAULT_SCOPES, Access, Resource, Role, parse_scopes
from weft.kernel.reasons import Reason

_MAKE = Access(Resource.KEYS, Role.CREATE)

log = get_logger("weft.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysDeps:
    """Collaborators of the endpoints of API keys."""

    gateway: GatewayDeps
    keys: KeysPort


async def list_keys(deps: KeysDeps, request: Request) -> Response:
    """Lists all keys without their secrets, newest first."""
    begin_read(request, SURFACE)
    return _json(await deps.keys.list_all())


async def revoke_key(deps: KeysDeps, request: Request) -> Response:
    """Revokes a key at once, on every gateway and router."""
    begin_change(request, SURFACE)
    key_id = _id_of(request)
    await deps.keys.revoke(key_id)
    _audit("key revoked", request, key_id)
    return Response(status_code=204)


async def create_key(deps: KeysDeps, request: Request) -> Response:
    """Creates a key. The answer is the only time that the secret is shown."""
    wanted = await read_optional_body(request, deps.gateway, NewKeyBody, SURFACE)
    _require_scopes(request, wanted.scopes or DEFAULT_SCOPES)
    made = await deps.keys.create(wanted)
    _audit("key made", request, made.id)
    return _shown_once(made, 201)


async def rotate_key(deps: KeysDeps, request: Request) -> Response:
    """Gives a key a new secret, shown only in this answer; the old one stays valid for a grace period."""
    wanted = await read_optional_body(request, deps.gateway, RotateBody, SURFACE)
    # The caller receives the new secret, whatever its tenant: so the caller must be allowed to create keys, and the key
    # may have no scope that the caller lacks. Scopes of a key never change.
    facts_of(request.scope).principal.require(_MAKE)
    key_id = _id_of(request)
    present = next((key for key in (await deps.keys.list_all()).items if key.id == key_id), None)
    if present is None:
        raise WeftError(Reason.NOT_FOUND, "there is no key of this id that is good")
    _require_scopes(request, present.scopes)
    rotated = await deps.keys.rotate(key_id, wanted.grace_seconds)
    _audit("key rotated", request, key_id)
    return _shown_once(rotated, 200)


def _require_scopes(request: Request, scopes: tuple[str, ...]) -> None:
    """Raises PERMISSION_DENIED for a scope that the caller lacks. The registry sees only the gateway's own key."""
    principal = facts_of(request.scope).principal
    for access in sorted(parse_scopes(scopes, "scopes") - principal.access, key=str):
        principal.require(access)


def _id_of(request: Request) -> str:
    return require_name(request.path_params["id"], "id")


def _audit(event: str, request: Request, key_id: str) -> None:
    facts = facts_of(request.scope)
    log.info(event, request_id=facts.request_id, id=key_id, by=facts.principal.name)


def _json(document: BaseModel, status: int = 200) -> Response:
    return json_response(document.model_dump(mode="json", by_alias=True, exclude_none=True), status)


def _shown_once(document: BaseModel, status: int) -> Response:
    response = _json(document, status)
    response.headers["cache-control"] = "no-store"
    return response
