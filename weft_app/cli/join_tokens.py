"""`weft runner token`: the tokens with which runners join."""

import re
from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict

from weft.api.registry.v1 import join_token_service_pb2 as pb
from weft.api.registry.v1.join_token_service_pb2_grpc import JoinTokenServiceStub
from weft.kernel.errors import invalid_field
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption
from weft_app.cli.output import Column, Listing, print_document, safe_text, say
from weft_app.cli.registry_calls import call_registry

_LIFETIME = re.compile(r"([1-9][0-9]{0,7})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

app = typer.Typer(help="Manage the tokens with which runners join.", no_args_is_help=True)

_TOKENS = Listing(
    empty="there are no join tokens; weft runner token create makes one",
    columns=(
        Column("ID", lambda token: token.get("id", "")),
        Column("DESCRIPTION", lambda token: token.get("description", "")),
        Column("CREATED", lambda token: token.get("createTime", "")),
        Column("EXPIRES", lambda token: token.get("expireTime", "never")),
    ),
    kind="JoinTokenList",
)


@app.command("create")
def create(
    description: Annotated[str, typer.Option("--description", "-d", help="Purpose, for people.")] = "",
    expires: Annotated[
        str | None, typer.Option("--expires", help="Lifetime, such as 12h or 30d. Default: unlimited.")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Create a token, and print the command with which a runner joins. The token is shown only this once.

    Example: weft runner token create --description "Ann's laptop" --expires 30d
    """
    request = pb.CreateJoinTokenRequest(description=description)
    if expires is not None:
        request.lifetime.FromSeconds(lifetime_seconds(expires, "--expires"))
    created = call_registry(home, JoinTokenServiceStub, "CreateJoinToken", request)
    command, hint = join_command(home, created.token)
    if output is not OutputFormat.TABLE:
        document = {"kind": "JoinToken", **MessageToDict(created.join_token), "token": created.token}
        print_document({**document, "joinCommand": command}, output)
        return
    say(f"token  {created.token}\n\njoin with:\n\n  {command}\n\n{hint}It is not shown again.\n")


@app.command("list")
def list_tokens(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the tokens, newest first, without their secrets.

    Example: weft runner token list -o json
    """
    found = call_registry(home, JoinTokenServiceStub, "ListJoinTokens", pb.ListJoinTokensRequest())
    _TOKENS.print([MessageToDict(token) for token in found.join_tokens], output)


@app.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the token, from `weft runner token list`.")],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Revoke a token. Runners that joined with it stay until their link ends.

    Example: weft runner token revoke 3k9x0a7bq2mz
    """
    call_registry(home, JoinTokenServiceStub, "RevokeJoinToken", pb.RevokeJoinTokenRequest(id=token_id))
    say(f"token {safe_text(token_id)} revoked\n")


def join_command(home: Path, token: str) -> tuple[str, str]:
    """Returns the command with which a runner joins, with a note when the mesh has no relay yet."""
    from weft_app.compose import invitation  # noqa: PLC0415 - every command starts fast
    from weft_app.compose.home import WeftHome  # noqa: PLC0415

    command = invitation.join_command(WeftHome(home.expanduser().absolute()), token)
    if command is None:
        hint = "No relay runs on this home: weft up --host 0.0.0.0 opens one, or relay.listen in weft.yaml.\n"
        return f"weft runner join https://HOST:PORT --token {token}", hint
    return command.text, ""


def lifetime_seconds(text: str, option: str) -> int:
    """Returns a length of time such as 12h. Raises INVALID_ARGUMENT naming the option."""
    found = _LIFETIME.fullmatch(text)
    if found is None:
        raise invalid_field(option, "must be a number and s, m, h or d, such as 12h or 30d")
    return int(found[1]) * _UNIT_SECONDS[found[2]]
