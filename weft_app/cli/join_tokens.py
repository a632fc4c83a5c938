"""`weft runner token`: the tokens with which runners join."""

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.client._channel import mesh_address
from weft.kernel.errors import invalid_field
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption, reporting
from weft_app.cli.output import Column, print_document, print_resources, safe_text, say

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weft.api.registry.v1.join_token_service_pb2_grpc import JoinTokenServiceStub

CALL_TIMEOUT_SECONDS = 5.0
_LIFETIME = re.compile(r"([1-9][0-9]{0,7})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

app = typer.Typer(help="Manage the tokens with which runners join.", no_args_is_help=True)

_COLUMNS = (
    Column("ID", lambda token: token["id"]),
    Column("DESCRIPTION", lambda token: token.get("description", "")),
    Column("CREATED", lambda token: token.get("createTime", "")),
    Column("EXPIRES", lambda token: token.get("expireTime", "never")),
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
    with reporting():
        from weft.api.registry.v1 import join_token_service_pb2 as pb  # noqa: PLC0415 - every command starts fast

        request = pb.CreateJoinTokenRequest(description=description)
        if expires is not None:
            request.lifetime.FromSeconds(lifetime_seconds(expires, "--expires"))
        with _tokens(home) as stub:
            created = stub.CreateJoinToken(request, timeout=CALL_TIMEOUT_SECONDS)
        command, hint = _join_command(home, created.token)
        if output is not OutputFormat.TABLE:
            document = {"kind": "JoinToken", **_plain(created.join_token), "token": created.token}
            print_document({**document, "joinCommand": command}, output)
            return
        say(f"token  {created.token}\n\njoin with:\n\n  {command}\n\n{hint}It is not shown again.\n")


@app.command("list")
def list_tokens(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the tokens, newest first, without their secrets.

    Example: weft runner token list -o json
    """
    with reporting():
        from weft.api.registry.v1 import join_token_service_pb2 as pb  # noqa: PLC0415 - every command starts fast

        with _tokens(home) as stub:
            found = stub.ListJoinTokens(pb.ListJoinTokensRequest(), timeout=CALL_TIMEOUT_SECONDS)
        print_resources("JoinTokenList", [_plain(token) for token in found.join_tokens], _COLUMNS, output)


@app.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the token, from `weft runner token list`.")],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Revoke a token. Runners that joined with it stay until their link ends.

    Example: weft runner token revoke 3k9x0a7bq2mz
    """
    with reporting():
        from weft.api.registry.v1 import join_token_service_pb2 as pb  # noqa: PLC0415 - every command starts fast

        with _tokens(home) as stub:
            stub.RevokeJoinToken(pb.RevokeJoinTokenRequest(id=token_id), timeout=CALL_TIMEOUT_SECONDS)
        say(f"token {safe_text(token_id)} revoked\n")


@contextmanager
def _tokens(home: "Path") -> "Iterator[JoinTokenServiceStub]":
    import grpc  # noqa: PLC0415 - every command starts fast

    from weft.api.registry.v1 import join_token_service_pb2_grpc  # noqa: PLC0415
    from weft.client._channel import open_mesh_channel  # noqa: PLC0415
    from weft.kernel.reasons import Reason  # noqa: PLC0415
    from weft.kernel.rpc import error_from_call  # noqa: PLC0415

    with open_mesh_channel(mesh_address(home, "registry")) as channel:
        try:
            yield join_token_service_pb2_grpc.JoinTokenServiceStub(channel)
        except grpc.RpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error


def _join_command(home: "Path", token: str) -> tuple[str, str]:
    """Returns the command with which a runner joins, with a note when the mesh has no relay yet."""
    from weft_app.compose.home import WeftHome  # noqa: PLC0415 - every command starts fast
    from weft_app.compose.relay import known_endpoint  # noqa: PLC0415

    endpoint = known_endpoint(WeftHome(home.expanduser().absolute()))
    if endpoint is None:
        hint = "No relay runs on this home: set relay.listen (such as 0.0.0.0:7443) in weft.yaml.\n"
        return f"weft runner join https://HOST:PORT --token {token}", hint
    pin = f" --fingerprint {endpoint.fingerprint}" if endpoint.fingerprint else ""
    return f"weft runner join {endpoint.url} --token {token}{pin}", ""


def lifetime_seconds(text: str, option: str) -> int:
    """Returns a length of time such as 12h. Raises INVALID_ARGUMENT naming the option."""
    found = _LIFETIME.fullmatch(text)
    if found is None:
        raise invalid_field(option, "must be a number and s, m, h or d, such as 12h or 30d")
    return int(found[1]) * _UNIT_SECONDS[found[2]]


def _plain(message: Any) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415 - every command starts fast

    return MessageToDict(message)
