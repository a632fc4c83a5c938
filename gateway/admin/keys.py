"""`/api/v1/keys`: list, make, rotate and revoke API keys. Only where callers need keys: else anybody could make one."""

import structlog
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from gateway.admin.keys_port import KeyList, KeysPort, NewKeyBody, NewKeyDocument, RotateBody
from gateway.admin.request import empty_body_or
from gateway.answers.unary import json_response
from gateway.intake.headers import require_local_caller
from gateway.intake.query import Query
from gateway.openapi import answers, json_body
from gateway.parts import GatewayParts
from gateway.request_facts import facts_of
from gateway.resources.endpoints import API, SURFACE
from weft.kernel.errors import WeftError
from weft.kernel.names import require_name
from weft.kernel.principal import DEFAULT_SCOPES, Access, Resource, Role, parse_scopes
from weft.kernel.reasons import Reason

PATH = f"{API}/keys"
_MAKE = Access(Resource.KEYS, Role.CREATE)

log = structlog.get_logger("weft.gateway")


def add_keys(app: FastAPI, parts: GatewayParts, keys: KeysPort) -> None:
    """Add the routes."""
    _add_reading(app, keys)
    _add_revoking(app, keys)
    _add_making(app, parts, keys)
    _add_rotating(app, parts, keys)


def _add_reading(app: FastAPI, keys: KeysPort) -> None:
    async def list_keys(request: Request) -> Response:
        """All keys without their secrets, newest first."""
        facts_of(request.scope).surface = SURFACE
        Query(request.scope)
        return _json(await keys.list_all())

    app.add_api_route(PATH, list_keys, methods=["GET"], tags=["keys"], openapi_extra=answers(KeyList))


def _add_revoking(app: FastAPI, keys: KeysPort) -> None:
    async def revoke_key(request: Request) -> Response:
        """Make a key useless at once, everywhere."""
        facts_of(request.scope).surface = SURFACE
        require_local_caller(request.scope)
        Query(request.scope)
        key_id = _id_of(request)
        await keys.revoke(key_id)
        _audit("key revoked", request, key_id)
        return Response(status_code=204)

    app.add_api_route(
        f"{PATH}/{{id}}",
        revoke_key,
        methods=["DELETE"],
        status_code=204,
        tags=["keys"],
        openapi_extra=answers(None, path="id"),
    )


def _add_making(app: FastAPI, parts: GatewayParts, keys: KeysPort) -> None:
    async def create_key(request: Request) -> Response:
        """Make a key. The answer is the only time that it is shown."""
        wanted = await empty_body_or(request, parts, NewKeyBody, SURFACE)
        _require_scopes(request, wanted.scopes or DEFAULT_SCOPES)
        made = await keys.create(wanted)
        _audit("key made", request, made.id)
        return _shown_once(made, 201)

    extra = json_body(NewKeyBody) | answers(NewKeyDocument, status=201)
    app.add_api_route(PATH, create_key, methods=["POST"], status_code=201, tags=["keys"], openapi_extra=extra)


def _add_rotating(app: FastAPI, parts: GatewayParts, keys: KeysPort) -> None:
    async def rotate_key(request: Request) -> Response:
        """Give a key a new secret; the old one stays good for a while. The answer is the only time that it is shown."""
        wanted = await empty_body_or(request, parts, RotateBody, SURFACE)
        # Whoever rotates a key has it, for whichever tenant: so they need to be one who may make keys, and it may do no
        # more than they may. Scopes of a key never change.
        facts_of(request.scope).principal.require(_MAKE)
        key_id = _id_of(request)
        present = next((key for key in (await keys.list_all()).items if key.id == key_id), None)
        if present is None:
            raise WeftError(Reason.NOT_FOUND, "there is no key of this id that is good")
        _require_scopes(request, present.scopes)
        rotated = await keys.rotate(key_id, wanted.grace_seconds)
        _audit("key rotated", request, key_id)
        return _shown_once(rotated, 200)

    extra = json_body(RotateBody) | answers(NewKeyDocument, path="id")
    app.add_api_route(f"{PATH}/{{id}}/rotate", rotate_key, methods=["POST"], tags=["keys"], openapi_extra=extra)


def _require_scopes(request: Request, scopes: tuple[str, ...]) -> None:
    """The registry sees this gateway, which may do everything; what the caller may is known only here."""
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
