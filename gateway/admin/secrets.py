"""`/v1/admin/secrets`: list, create, update and delete secrets. No answer contains a value."""

from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import json_response
from gateway.deps import Gateway
from gateway.intake.query import begin_change, begin_read
from gateway.operation_client import read_body
from gateway.registry_client import RegistryService
from gateway.request_facts import facts_of
from gateway.resources.resource_handlers import SURFACE
from gateway.routing import collaborator
from weft.api.registry.v1 import secret_service_pb2 as pb
from weft.documents.codec import document_of
from weft.documents.document_base import DocumentPart
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.names import MAX_NAME_CHARS, require_name

log = get_logger("weft.gateway")

MAX_VALUE_CHARS = 8_192
DELETE_PARAMETERS = ("force",)


class SecretValueBody(DocumentPart):
    """A new value of a secret."""

    value: Annotated[str, Field(min_length=1, max_length=MAX_VALUE_CHARS, repr=False)]
    """Printable ASCII characters, without leading or trailing spaces. It is stored encrypted and never shown."""


class NewSecretBody(SecretValueBody):
    """A new secret."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    """Name of the secret."""


Secrets = Annotated[RegistryService, collaborator("secrets")]


async def list_secrets(secrets: Secrets, request: Request) -> Response:
    """Lists all secrets by name, without their values."""
    begin_read(request, SURFACE)
    return json_response(document_of(await secrets.ListSecrets(pb.ListSecretsRequest())))


async def create_secret(deps: Gateway, secrets: Secrets, request: Request) -> Response:
    """Creates a secret. Its value is stored encrypted and never shown."""
    wanted = await read_body(request, deps.config, NewSecretBody, SURFACE)
    name = require_name(wanted.name, "name")
    created: pb.CreateSecretResponse = await secrets.CreateSecret(pb.CreateSecretRequest(name=name, value=wanted.value))
    _audit("secret created", request, name)
    return json_response(document_of(created.secret), 201)


async def update_secret(deps: Gateway, secrets: Secrets, request: Request) -> Response:
    """Changes the value of a secret. Models that use it apply the new value to their next request."""
    name = require_name(request.path_params["name"], "name")
    wanted = await read_body(request, deps.config, SecretValueBody, SURFACE)
    updated: pb.UpdateSecretResponse = await secrets.UpdateSecret(pb.UpdateSecretRequest(name=name, value=wanted.value))
    _audit("secret updated", request, name)
    return json_response(document_of(updated.secret))


async def delete_secret(secrets: Secrets, request: Request) -> Response:
    """Deletes a secret. If a model uses it, the answer is 409 unless `force` is set."""
    query = begin_change(request, SURFACE, DELETE_PARAMETERS)
    name = require_name(request.path_params["name"], "name")
    await secrets.DeleteSecret(pb.DeleteSecretRequest(name=name, force=query.flag("force")))
    _audit("secret deleted", request, name)
    return Response(status_code=204)


def _audit(event: str, request: Request, name: str) -> None:
    facts = facts_of(request.scope)
    log.info(event, request_id=facts.request_id, name=name, by=facts.principal.name)
