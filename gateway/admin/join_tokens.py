"""`/v1/admin/join-tokens`: list, make and revoke the tokens with which runners join."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import grpc
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from gateway.answers.unary import json_response
from gateway.auth.authentication import HOME_SOCKET
from gateway.deps import GatewayDeps
from gateway.intake.query import begin_change, begin_read
from gateway.operations import read_body
from gateway.request_facts import facts_of
from gateway.resources.registry_client import RegistryCalls
from gateway.routing import collaborator
from weft.api.gateway.v1.new_join_token_pb2 import NewJoinToken
from weft.api.registry.v1 import join_token_service_pb2 as pb
from weft.api.registry.v1 import join_token_service_pb2_grpc
from weft.documents.codec import document_of
from weft.documents.document_base import DocumentPart
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.names import require_name
from weft.kernel.reasons import Reason

SURFACE = "admin"
MAX_DESCRIPTION_CHARS = 128
MIN_LIFETIME_SECONDS = 60
MAX_LIFETIME_SECONDS = 10 * 366 * 86_400

log = get_logger("weft.gateway")


class NewJoinTokenBody(DocumentPart):
    """The properties of a new join token."""

    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] = ""
    """What it is for; one line."""
    lifetime_seconds: Annotated[int, Field(ge=MIN_LIFETIME_SECONDS, le=MAX_LIFETIME_SECONDS)] | None = None
    """How long it is good. Absent: without limit."""


class JoinTokensPort(Protocol):
    """Keeps the join tokens; see `JoinTokensClient`.

    Every method raises the WeftError that the registry answers, SERVICE_UNAVAILABLE when it cannot be reached, and
    DEADLINE_EXCEEDED when it does not answer in time.
    """

    async def list_all(self) -> pb.ListJoinTokensResponse:
        """Returns all tokens without their secrets, newest first."""
        ...

    async def create(self, request: pb.CreateJoinTokenRequest) -> pb.CreateJoinTokenResponse:
        """Makes a token; returns it with its secret."""
        ...

    async def revoke(self, token_id: str) -> None:
        """Revokes a token. Raises NOT_FOUND."""
        ...


class JoinTokensClient(JoinTokensPort):
    """The registry's join tokens as `JoinTokensPort`."""

    def __init__(self, registry: grpc.aio.Channel, *, timeout_seconds: float) -> None:
        # Typed as synchronous by the generated code, whatever the channel.
        self._tokens: Any = join_token_service_pb2_grpc.JoinTokenServiceStub(registry)
        self._calls = RegistryCalls(_callers_field, timeout_seconds=timeout_seconds)

    @override
    async def list_all(self) -> pb.ListJoinTokensResponse:
        request = pb.ListJoinTokensRequest()
        found: pb.ListJoinTokensResponse = await self._calls.call(self._tokens.ListJoinTokens, request)
        return found

    @override
    async def create(self, request: pb.CreateJoinTokenRequest) -> pb.CreateJoinTokenResponse:
        created: pb.CreateJoinTokenResponse = await self._calls.call(self._tokens.CreateJoinToken, request)
        return created

    @override
    async def revoke(self, token_id: str) -> None:
        await self._calls.call(self._tokens.RevokeJoinToken, pb.RevokeJoinTokenRequest(id=token_id))


def _callers_field(field: str) -> str:
    return "lifetimeSeconds" if field == "lifetime" else field


class JoinCommand(Protocol):
    """The command with which a runner joins."""

    @property
    def text(self) -> str:
        """What is typed on the other machine."""
        ...

    @property
    def this_machine_only(self) -> bool:
        """Whether it works on the mesh's own machine alone."""
        ...


JoinCommands = Callable[[str], JoinCommand | None]
"""Returns the command that joins with a token; None: no runner can join here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTokenDeps:
    """Collaborators of the endpoints of join tokens."""

    gateway: GatewayDeps
    tokens: JoinTokensPort
    join_command: JoinCommands


JoinTokens = Annotated[JoinTokenDeps, collaborator(JoinTokenDeps)]


async def list_join_tokens(deps: JoinTokens, request: Request) -> Response:
    """Lists all join tokens without their secrets, newest first."""
    begin_read(request, SURFACE)
    return json_response(document_of(await deps.tokens.list_all()))


async def create_join_token(deps: JoinTokens, request: Request) -> Response:
    """Makes a join token, with the command to type on the other machine; the only time that it is shown."""
    wanted = await read_body(request, deps.gateway.config, NewJoinTokenBody, SURFACE, optional=True)
    # On the socket of its home the caller names relays elsewhere.
    if deps.join_command("") is None and not request.scope.get(HOME_SOCKET):
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION,
            "no runner can join here: the mesh listens on this machine alone; weft up --host 0.0.0.0, or relay.listen "
            "in weft.yaml, opens it. Where the router runs on another machine, type there: weft runner token create",
        )
    creation = pb.CreateJoinTokenRequest(description=wanted.description)
    if wanted.lifetime_seconds is not None:
        creation.lifetime.FromSeconds(wanted.lifetime_seconds)
    made = await deps.tokens.create(creation)
    _note("join token made", request, made.join_token.id)
    command = deps.join_command(made.token)
    answer = NewJoinToken(join_token=made.join_token, token=made.token)
    if command is not None:
        answer.command, answer.this_machine_only = command.text, command.this_machine_only
    response = json_response(document_of(answer), 201)
    response.headers["cache-control"] = "no-store"
    return response


async def revoke_join_token(deps: JoinTokens, request: Request) -> Response:
    """Revokes a join token immediately for new links; runners that joined with it stay until their link ends."""
    begin_change(request, SURFACE)
    token_id = require_name(request.path_params["id"], "id")
    await deps.tokens.revoke(token_id)
    _note("join token revoked", request, token_id)
    return Response(status_code=204)


def _note(event: str, request: Request, token_id: str) -> None:
    facts = facts_of(request.scope)
    log.info(event, request_id=facts.request_id, id=token_id, by=facts.principal.name)
