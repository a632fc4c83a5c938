"""/api/v1/profiles/{name}: saves the current state as a profile, and switches to one."""

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import json_response
from gateway.deps import Gateway
from gateway.intake.body import read_model
from gateway.intake.headers import require_local_caller
from gateway.intake.query import Query
from gateway.request_facts import facts_of
from gateway.resources.documents import applied_body, switched_body
from gateway.resources.handlers import SURFACE, author_of, name_of
from weft.api.registry.v1.declaration_service_pb2 import ApplyResult
from weft.api.registry.v1.profile_service_pb2 import SaveProfileRequest, SwitchProfileRequest
from weft.documents.document_base import DocumentPart
from weft.documents.profiles import documents_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import ProfileDocument
from weft.documents.rights import names_secret
from weft.kernel.log import get_logger
from weft.kernel.names import require_name
from weft.kernel.principal import LOCAL, OPERATE, USE_SECRETS

PARAMETERS = ("dryRun",)

log = get_logger("weft.gateway")


class SaveProfileBody(DocumentPart):
    """Options of saving the current state as a profile."""

    description: Annotated[str, Field(max_length=1024)] = ""
    """Description for people. Empty: unchanged."""
    leave_others: bool = False
    """Whether a switch to the profile leaves other loaded models unchanged instead of unloading them."""


async def save_profile(deps: Gateway, request: Request) -> Response:
    """Saves the current state as a profile, and replaces an existing one. Answers 201 if there was none."""
    facts = facts_of(request.scope)
    facts.surface = SURFACE
    require_local_caller(request.scope)
    dry_run = Query(request.scope, frozenset(PARAMETERS)).flag("dryRun")
    name = require_name(request.path_params["name"], "name")
    body = await read_model(request, SaveProfileBody, deps.config)
    wanted = SaveProfileRequest(
        name=name,
        description=body.description,
        leave_others=body.leave_others,
        dry_run=dry_run,
        requested_by=author_of(request).name,
    )
    result = await deps.registry.save_profile(wanted)
    if not dry_run:
        log.info("profile saved", request_id=facts.request_id, name=name)
    is_new = not dry_run and result.outcome == ApplyResult.OUTCOME_CREATED
    return json_response(applied_body([result], dry_run=dry_run), 201 if is_new else 200)


async def switch_profile(deps: Gateway, request: Request) -> Response:
    """Switches to a profile: declares its resources, and starts the operations that load and unload models."""
    facts = facts_of(request.scope)
    facts.surface = SURFACE
    require_local_caller(request.scope)
    dry_run, name = Query(request.scope, frozenset(PARAMETERS)).flag("dryRun"), name_of(request)
    profile = await deps.registry.get(ResourceKind.PROFILE, name)
    assert isinstance(profile, ProfileDocument)
    # The registry sees only the gateway's own key.
    if profile.names_models:
        facts.principal.require(OPERATE)
    if names_secret(documents_of(profile.declared)):
        facts.principal.require(USE_SECRETS)
    wanted = SwitchProfileRequest(name=name, dry_run=dry_run, requested_by=_requester(request))
    switched = await deps.registry.switch_profile(wanted)
    if not dry_run:
        log.info("switched to a profile", request_id=facts.request_id, name=name, models=len(switched.steps))
    return json_response(switched_body(switched, name, dry_run=dry_run))


def _requester(request: Request) -> str:
    """Returns the caller's name for the audit log and for operations."""
    principal = facts_of(request.scope).principal
    return "http" if principal is LOCAL else principal.name
