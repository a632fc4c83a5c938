"""`/v1/admin/join-tokens`: list, create and revoke the tokens with which runners join."""

from collections.abc import Callable
from typing import Annotated, Protocol

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import json_response
from gateway.auth.authentication import HOME_SOCKET
from gateway.deps import Gateway
from gateway.intake.query import begin_change, begin_read
from gateway.operation_client import read_body
from gateway.registry_client import RegistryService
from gateway.request_facts import facts_of
from gateway.routing import collaborator
from weft.api.gateway.v1.new_join_token_pb2 import NewJoinToken
from weft.api.registry.v1 import join_token_service_pb2 as pb
from weft.documents.codec import document_of
from weft.documents.document_base import DocumentPart
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.names import require_name

SURFACE = "admin"
MAX_DESCRIPTION_CHARS = 128
MAX_PATTERN_CHARS = 128
MIN_LIFETIME_SECONDS = 60
MAX_LIFETIME_SECONDS = 10 * 366 * 86_400

log = get_logger("weft.gateway")


class NewJoinTokenBody(DocumentPart):
    """The properties of a new join token."""

    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] = ""
    """Purpose of the token; one line."""
    lifetime_seconds: Annotated[int, Field(ge=MIN_LIFETIME_SECONDS, le=MAX_LIFETIME_SECONDS)] | None = None
    """How long the token is valid. Absent: 7 days."""
    name_pattern: Annotated[str, Field(max_length=MAX_PATTERN_CHARS)] = ""
    """Names that runners, models and agents may have, such as `desk-*`. Absent: any unused one."""
    pool: Annotated[str, Field(max_length=MAX_PATTERN_CHARS)] = ""
    """Pool of others that models may join. Absent: none."""
    reusable: bool = False
    """Whether any number of machines may join with it."""


class JoinCommand(Protocol):
    """The command with which a runner joins."""

    @property
    def text(self) -> str:
        """The command to run on the other machine."""
        ...

    @property
    def this_machine_only(self) -> bool:
        """Whether it works only on the mesh's own machine."""
        ...


JoinCommands = Callable[[str], JoinCommand | None]
"""Returns the command that joins with a token; None: no runner can join here."""


JoinTokens = Annotated[RegistryService, collaborator("join tokens")]
Commands = Annotated[JoinCommands, collaborator("join commands")]


async def list_join_tokens(tokens: JoinTokens, request: Request) -> Response:
    """Lists all join tokens and joined machines without their secrets, newest first."""
    begin_read(request, SURFACE)
    return json_response(document_of(await tokens.ListJoinTokens(pb.ListJoinTokensRequest())))


async def create_join_token(deps: Gateway, tokens: JoinTokens, join_command: Commands, request: Request) -> Response:
    """Creates a join token, with the join command for the other machine. The token is shown only in this answer."""
    wanted = await read_body(request, deps.config, NewJoinTokenBody, SURFACE, optional=True)
    # On the home's socket, the caller names relays itself.
    if join_command("") is None and not request.scope.get(HOME_SOCKET):
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION,
            "no runner can join here: the mesh listens on this machine alone; weft up --host 0.0.0.0, or relay.listen "
            "in weft.yaml, opens it. Where the router runs on another machine, type there: weft runner token create",
        )
    creation = pb.CreateJoinTokenRequest(
        description=wanted.description, name_pattern=wanted.name_pattern, pool=wanted.pool, reusable=wanted.reusable
    )
    if wanted.lifetime_seconds is not None:
        creation.lifetime.FromSeconds(wanted.lifetime_seconds)
    made: pb.CreateJoinTokenResponse = await tokens.CreateJoinToken(creation)
    _note("join token made", request, made.join_token.id)
    command = join_command(made.token)
    answer = NewJoinToken(join_token=made.join_token, token=made.token)
    if command is not None:
        answer.command, answer.this_machine_only = command.text, command.this_machine_only
    response = json_response(document_of(answer), 201)
    response.headers["cache-control"] = "no-store"
    return response


async def revoke_join_token(tokens: JoinTokens, request: Request) -> Response:
    """Revokes a join token or a machine. Runners that joined with it leave the mesh."""
    begin_change(request, SURFACE)
    token_id = require_name(request.path_params["id"], "id")
    await tokens.RevokeJoinToken(pb.RevokeJoinTokenRequest(id=token_id))
    _note("join token revoked", request, token_id)
    return Response(status_code=204)


def _note(event: str, request: Request, token_id: str) -> None:
    facts = facts_of(request.scope)
    log.info(event, request_id=facts.request_id, id=token_id, by=facts.principal.name)
