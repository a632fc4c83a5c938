"""`weft runner token`: the tokens with which runners join."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from weft.kernel.errors.error_tree import invalid_field
from weft_app.cli.mesh_api import connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption
from weft_app.cli.output import Listing, custom_columns, print_document
from weft_app.cli.terminal import safe_text, say

_LIFETIME = re.compile(r"([1-9][0-9]{0,7})([smhd])")
_NO_RELAY = (
    "No relay runs on this home. Start one with weft up --host 0.0.0.0 or relay.listen in weft.yaml. If routers run "
    "on other machines, name the relay of each with --address HOST:PORT.\n"
)
JOIN_TOKENS = "/v1/admin/join-tokens"
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

app = typer.Typer()

_TOKENS = Listing(
    empty="there are no join tokens and no joined machines; create a token with weft runner token create",
    columns=custom_columns(
        "ID:id TYPE:type NAMES POOL:pool DESCRIPTION:description CREATED:createTime EXPIRES",
        NAMES=lambda token: token.get("namePattern") or " ".join(token.get("names", [])) or "new ones",
        EXPIRES=lambda token: token.get("expireTime", "never"),
    ),
    kind="JoinTokenList",
)


@app.command("create")
def create(
    *,
    description: Annotated[str, typer.Option("--description", "-d", help="Description of its purpose.")] = "",
    names: Annotated[
        str,
        typer.Option(
            "--name",
            help="Names that the machine's runners, models and agents may have, such as 'desk-*'. "
            "Default: any unused one.",
        ),
    ] = "",
    pool: Annotated[str, typer.Option(help="Pool of others that its models may join. Default: none.")] = "",
    reusable: Annotated[
        bool, typer.Option("--reusable", help="Let any number of machines join with it; they share its names.")
    ] = False,
    expires: Annotated[str | None, typer.Option(help="Lifetime, such as 12h or 30d. Default: 7d.")] = None,
    addresses: Annotated[
        list[str] | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="Address at which runners join, instead of this home's relay; repeat it for each router with a relay.",
        ),
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            help="With --address: fingerprint of the relays' certificate. Default: that of this home's relay; none "
            "for a certificate of a public authority."
        ),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Create a token, and print the command with which one machine joins. The token is shown only this once.

    Example: weft runner token create --description "Ann's laptop" --name 'ann-*' --pool qwen
    """
    # First, so that invalid addresses create no token.
    invite = inviting(home, addresses or (), fingerprint)
    lifetime = {} if expires is None else {"lifetimeSeconds": lifetime_seconds(expires, "--expires")}
    with connect(home) as api:
        limits = {"namePattern": names, "pool": pool, "reusable": reusable}
        created = api.post(JOIN_TOKENS, {"description": description, **limits, **lifetime})
    command, hint = invite(created["token"])
    if output is not OutputFormat.TABLE:
        token = {name: value for name, value in created.items() if name not in ("command", "thisMachineOnly")}
        print_document({**token, "kind": "JoinToken", "joinCommand": command}, output)
        return
    say(f"token  {created['token']}\n\njoin with:\n\n  {command}\n\n{hint}It is not shown again.\n")


@app.command("list")
def list_tokens(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the tokens and the machines that joined, newest first, without their secrets.

    Example: weft runner token list -o json
    """
    with connect(home) as api:
        _TOKENS.print(api.get(JOIN_TOKENS)["items"], output)


@app.command("revoke")
def revoke(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the token or machine, from `weft runner token list`.")
    ],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Revoke a token or a machine. The runners that joined with it leave the mesh.

    Example: weft runner token revoke 3k9x0a7bq2mz
    """
    with connect(home) as api:
        api.delete(f"{JOIN_TOKENS}/{token_id}")
    say(f"token {safe_text(token_id)} revoked\n")


def inviting(home: Path, addresses: Sequence[str], fingerprint: str | None) -> Callable[[str], tuple[str, str]]:
    """Returns a function from a token to the join command, and a note if the mesh has no relay yet.

    `addresses` are those of relays, by default of this home's relay. Raises INVALID_ARGUMENT for invalid ones.
    """
    from weft_app.compose import invitation  # noqa: PLC0415 - every command starts fast
    from weft_app.compose.home import WeftHome  # noqa: PLC0415
    from weft_app.compose.join_address import parse_fingerprint  # noqa: PLC0415
    from weft_app.compose.relay import known_endpoint  # noqa: PLC0415

    if fingerprint is not None and not addresses:
        raise invalid_field("--fingerprint", "needs --address")
    endpoint = known_endpoint(WeftHome(home.expanduser().absolute()))
    known = "" if endpoint is None else endpoint.fingerprint
    pin = known if fingerprint is None else parse_fingerprint(fingerprint, "--fingerprint")
    # Rejects invalid addresses.
    invitation.invitation_to_relays(addresses, pin, "")

    def invite(token: str) -> tuple[str, str]:
        if addresses:
            return f"weft runner join {invitation.invitation_to_relays(addresses, pin, token).text}", ""
        return join_command(home, token)

    return invite


def join_command(home: Path, token: str) -> tuple[str, str]:
    """Returns the command that joins a runner at this home's relay, and a note if it has none."""
    from weft_app.compose import invitation  # noqa: PLC0415 - every command starts fast
    from weft_app.compose.home import WeftHome  # noqa: PLC0415

    command = invitation.join_command(WeftHome(home.expanduser().absolute()), token)
    if command is None:
        return f"weft runner join https://HOST:PORT --token {token}", _NO_RELAY
    return command.text, ""


def lifetime_seconds(text: str, option: str) -> int:
    """Parses a duration such as 12h. Raises INVALID_ARGUMENT naming the option."""
    found = _LIFETIME.fullmatch(text)
    if found is None:
        raise invalid_field(option, "must be a number and s, m, h or d, such as 12h or 30d")
    return int(found[1]) * _UNIT_SECONDS[found[2]]
