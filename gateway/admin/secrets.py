"""`/v1/admin/secrets`: list, create, update and delete secrets. No answer holds a value."""

from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import grpc
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from gateway.answers.unary import json_response
from gateway.deps import GatewayDeps
from gateway.intake.query import begin_change, begin_read
from gateway.operations import read_body
from gateway.request_facts import facts_of
from gateway.resources.handlers import SURFACE
from gateway.resources.registry_client import RegistryCalls
from gateway.routing import collaborator
from weft.api.registry.v1 import secret_service_pb2 as pb
from weft.api.registry.v1 import secret_service_pb2_grpc
from weft.documents.codec import document_of
from weft.documents.document_base import DocumentPart
from weft.kernel.log import get_logger
from weft.kernel.names import MAX_NAME_CHARS, require_name

log = get_logger("weft.gateway")

MAX_VALUE_CHARS = 8_192
DELETE_PARAMETERS = ("force",)


class SecretValueBody(DocumentPart):
    """A new value of a secret."""

    value: Annotated[str, Field(min_length=1, max_length=MAX_VALUE_CHARS, repr=False)]
    """Printable ASCII characters, without a space at either end. It is stored encrypted, and never shown."""


class NewSecretBody(SecretValueBody):
    """A new secret."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    """Its name."""


class SecretsPort(Protocol):
    """Stores the secrets; see `SecretsClient`.

    Every method raises the WeftError that the registry answers, SERVICE_UNAVAILABLE when it cannot be reached, and
    DEADLINE_EXCEEDED when it does not answer in time.
    """

    async def list_all(self) -> pb.ListSecretsResponse:
        """Returns all secrets by name, without their values."""
        ...

    async def create(self, request: pb.CreateSecretRequest) -> pb.Secret:
        """Creates a secret. Raises ALREADY_EXISTS."""
        ...

    async def update(self, request: pb.UpdateSecretRequest) -> pb.Secret:
        """Gives a secret a new value. Raises NOT_FOUND."""
        ...

    async def delete(self, name: str, *, force: bool) -> None:
        """Deletes a secret. Raises NOT_FOUND, and RESOURCE_IN_USE unless forced."""
        ...


class SecretsClient(SecretsPort):
    """The registry's secrets as `SecretsPort`."""

    def __init__(self, registry: grpc.aio.Channel, *, timeout_seconds: float) -> None:
        # Typed as synchronous by the generated code, whatever the channel.
        self._secrets: Any = secret_service_pb2_grpc.SecretServiceStub(registry)
        self._calls = RegistryCalls(lambda field: field, timeout_seconds=timeout_seconds)

    @override
    async def list_all(self) -> pb.ListSecretsResponse:
        found: pb.ListSecretsResponse = await self._calls.call(self._secrets.ListSecrets, pb.ListSecretsRequest())
        return found

    @override
    async def create(self, request: pb.CreateSecretRequest) -> pb.Secret:
        created: pb.CreateSecretResponse = await self._calls.call(self._secrets.CreateSecret, request)
        return created.secret

    @override
    async def update(self, request: pb.UpdateSecretRequest) -> pb.Secret:
        updated: pb.UpdateSecretResponse = await self._calls.call(self._secrets.UpdateSecret, request)
        return updated.secret

    @override
    async def delete(self, name: str, *, force: bool) -> None:
        await self._calls.call(self._secrets.DeleteSecret, pb.DeleteSecretRequest(name=name, force=force))


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretsDeps:
    """Collaborators of the endpoints of secrets."""

    gateway: GatewayDeps
    secrets: SecretsPort


Secrets = Annotated[SecretsDeps, collaborator(SecretsDeps)]


async def list_secrets(deps: Secrets, request: Request) -> Response:
    """Lists all secrets by name, without their values."""
    begin_read(request, SURFACE)
    return json_response(document_of(await deps.secrets.list_all()))


async def create_secret(deps: Secrets, request: Request) -> Response:
    """Creates a secret. Its value is encrypted, and no answer shows it."""
    wanted = await read_body(request, deps.gateway.config, NewSecretBody, SURFACE)
    name = require_name(wanted.name, "name")
    created = await deps.secrets.create(pb.CreateSecretRequest(name=name, value=wanted.value))
    _audit("secret created", request, name)
    return json_response(document_of(created), 201)


async def update_secret(deps: Secrets, request: Request) -> Response:
    """Gives a secret a new value, which the next request of a model that uses it takes."""
    name = require_name(request.path_params["name"], "name")
    wanted = await read_body(request, deps.gateway.config, SecretValueBody, SURFACE)
    updated = await deps.secrets.update(pb.UpdateSecretRequest(name=name, value=wanted.value))
    _audit("secret updated", request, name)
    return json_response(document_of(updated))


async def delete_secret(deps: Secrets, request: Request) -> Response:
    """Deletes a secret. One that a model uses is refused with 409, unless `force` is set."""
    query = begin_change(request, SURFACE, DELETE_PARAMETERS)
    name = require_name(request.path_params["name"], "name")
    await deps.secrets.delete(name, force=query.flag("force"))
    _audit("secret deleted", request, name)
    return Response(status_code=204)


def _audit(event: str, request: Request, name: str) -> None:
    facts = facts_of(request.scope)
    log.info(event, request_id=facts.request_id, name=name, by=facts.principal.name)
