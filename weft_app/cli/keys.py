"""`weft keys`: the API keys that authenticate callers."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.kernel.access.principal import DEFAULT_SCOPES, Resource
from weft_app.cli.completion import KEYS, complete_key_id
from weft_app.cli.join_tokens import lifetime_seconds
from weft_app.cli.mesh_api import Document, connect
from weft_app.cli.options import DEFAULT_HOME, HomeOption, NamedFormat
from weft_app.cli.output import Listing, custom_columns, print_outcome
from weft_app.cli.short_ids import KEYS as KEY_IDS
from weft_app.cli.short_ids import full_id

app = typer.Typer()


class KeyRole(StrEnum):
    """Named sets of scopes."""

    USER = "user"
    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"
    SERVICE = "service"


_WITHHELD = (Resource.KEYS, Resource.SECRETS, Resource.MESH)
_SCOPES: Mapping[KeyRole, tuple[str, ...]] = {
    KeyRole.USER: DEFAULT_SCOPES,
    KeyRole.VIEWER: ("*:view",),
    KeyRole.OPERATOR: tuple(f"{each.value}:*" for each in Resource if each not in _WITHHELD),
    KeyRole.ADMIN: ("*:*",),
    # A gateway calls the registry for its callers, with every scope that they may use.
    KeyRole.SERVICE: ("*:*", f"{Resource.MESH.value}:*"),
}


def scopes_of(role: KeyRole) -> tuple[str, ...]:
    """Returns the scopes of a role; docs/security.md shows the same table."""
    return _SCOPES[role]


_KEYS = Listing(
    empty="there are no API keys; create the first with weft keys create. Callers need a key from then on",
    columns=custom_columns(
        "ID:id STATE:state TENANT:tenant SCOPES:scopes:commas MAX_PRIORITY CREATED:createTime EXPIRES "
        "DESCRIPTION:description",
        MAX_PRIORITY=lambda key: key.get("maxPriority", "high"),
        EXPIRES=lambda key: key.get("expireTime", "never"),
    ),
    name=lambda key: key.get("id", ""),
    kind="ApiKeyList",
)


FormatOption = Annotated[
    NamedFormat, typer.Option("--output", "-o", help="Output format; `name` prints the id, or the new key.")
]
IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="Id of the key, or its beginning.", autocompletion=complete_key_id)
]


@app.command("create")
def create(
    *,
    tenant: Annotated[str, typer.Option(help="Tenant of its requests. Default: `default`.")] = "",
    scopes: Annotated[
        list[str] | None,
        typer.Option("--scope", help="Scope, such as `models:view`, or `models/team-a-*:edit` for names (repeatable)."),
    ] = None,
    role: Annotated[KeyRole | None, typer.Option(help="Named set of scopes. Default without --scope: user.")] = None,
    expires: Annotated[str | None, typer.Option(help="Lifetime, such as 12h or 90d. Default: unlimited.")] = None,
    max_priority: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS", help="Highest priority class of its requests: high, normal or low. Default: high."
        ),
    ] = None,
    description: Annotated[str, typer.Option("--description", "-d", help="Description of its purpose.")] = "",
    home: HomeOption = DEFAULT_HOME,
    output: FormatOption = NamedFormat.TABLE,
) -> None:
    """Create a key, and print it. It is shown only this once.

    A scope may be limited to a name of models, agents and routes, or to a beginning of names.

    Example: weft keys create --tenant team-a --scope 'inference/team-a-*:create' --scope 'models/team-a-*:view'
    """
    wanted = dict.fromkeys((*(scopes_of(role) if role else ()), *(scopes or ())))
    body: dict[str, object] = {"description": description, "tenant": tenant, "scopes": list(wanted)}
    if expires is not None:
        body["lifetimeSeconds"] = lifetime_seconds(expires, "--expires")
    if max_priority is not None:
        body["maxPriority"] = max_priority
    with connect(home) as api:
        made = api.post(KEYS, body)
    _show_new(home, made, output)


@app.command("list")
def list_keys(home: HomeOption = DEFAULT_HOME, output: FormatOption = NamedFormat.TABLE) -> None:
    """List the keys, newest first, without their secrets. Revoked and expired keys stay listed for 30 days.

    Example: weft keys list -o json
    """
    with connect(home) as api:
        _KEYS.print(api.get(KEYS)["items"], output)


@app.command("revoke")
def revoke(key_id: IdArgument, home: HomeOption = DEFAULT_HOME, output: FormatOption = NamedFormat.TABLE) -> None:
    """Revoke a key immediately. Running requests finish.

    Example: weft keys revoke 3k9x0a7bq2mz
    """
    with connect(home) as api:
        key_id = full_id(api, KEY_IDS, key_id)
        api.delete(f"{KEYS}/{key_id}")
    document = {"kind": "ApiKey", "id": key_id, "state": "revoked"}
    print_outcome(output, f"key {key_id} revoked", key_id, document)


@app.command("rotate")
def rotate(
    key_id: IdArgument,
    grace: Annotated[str | None, typer.Option(help="Grace period of the old secret, 0 to 30d. Default: 1h.")] = None,
    home: HomeOption = DEFAULT_HOME,
    output: FormatOption = NamedFormat.TABLE,
) -> None:
    """Give a key a new secret, and print it. It is shown only this once; a secret still in grace ends immediately.

    Example: weft keys rotate 3k9x0a7bq2mz --grace 1d
    """
    seconds = None if grace is None else 0 if grace == "0" else lifetime_seconds(grace, "--grace")
    with connect(home) as api:
        rotated = api.post(
            f"{KEYS}/{full_id(api, KEY_IDS, key_id)}/rotate", {} if seconds is None else {"graceSeconds": seconds}
        )
    _show_new(home, rotated, output)


def _show_new(home: Path, key: Document, output: NamedFormat) -> None:
    """Prints a new secret, which is shown only once."""
    old = f"the old secret is valid until {key['oldExpireTime']}\n" if "oldExpireTime" in key else ""
    example = _curl_line(home, key["key"]) if output is NamedFormat.TABLE else ""
    table = f"key  {key['key']}\n\ntry it:\n\n  {example}\n\n{old}It is not shown again."
    print_outcome(output, table, key["key"], key | {"kind": "ApiKey"})


def _curl_line(home: Path, text: str) -> str:
    from weft_app.compose.home import WeftHome  # noqa: PLC0415 - every command starts fast

    running = WeftHome(home.expanduser().absolute()).running()
    url = running["url"] if running and "url" in running else "http://HOST:PORT"
    return f"curl {url}/v1/models -H 'Authorization: Bearer {text}'"
