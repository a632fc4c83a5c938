"""`weft launch`: starts a program that uses one of the mesh's APIs, with the environment variables for this mesh."""

import os
import shlex
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.client._home import URL_VARIABLE, mesh_ca_file
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.access.principal import KEY_PREFIX
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.values.names import AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX
from weft_app.cli.completion import KEYS, complete_chat_target
from weft_app.cli.keys import KeyRole, scopes_of
from weft_app.cli.launch_tools import TOOLS, Access, Tool
from weft_app.cli.mesh_api import Document, MeshApi, connect, connection_to, gateway_url, own_url
from weft_app.cli.options import DEFAULT_HOME, HomeOption, NamedFormat
from weft_app.cli.output import Listing, custom_columns, moment_in
from weft_app.cli.terminal import note, say
from weft_app.compose.home import WeftHome

KEY_VARIABLE = "WEFT_API_KEY"
"""Variable with a key to use instead of a new one."""
ANY_KEY = "local"
"""Sent if callers need no key, as programs require one."""
KEY_LIFETIME_SECONDS = 30 * 86_400
KEY_FOLDER = "launch-keys"
"""Folder in the home with the key of each tool, readable only by its owner: the mesh only has digests."""
MIN_VALID = timedelta(days=1)
"""Keys that expire earlier are replaced."""
MAX_NAMES = 10

_TABLE = Listing(
    columns=custom_columns("TOOL:tool NAME:title INSTALLED:installed INSTALL:install"),
    name=lambda row: str(row["tool"]),
    kind="ToolList",
    plural="tools",
)

CALL_TIMEOUT_SECONDS = 5.0
_REFUSED = frozenset({Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED})
_OTHERS = (AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpMesh:
    """The gateway of the mesh for a home's commands."""

    url: str
    """Without `/v1`."""
    ca_file: Path | None
    """Roots for its certificate; None: the system's."""
    is_own: bool

    def asks_for_keys(self) -> bool:
        """Whether callers need a key. Raises SERVICE_UNAVAILABLE if the gateway does not answer."""
        return self._listed("") is None

    def models(self, key: str) -> list[str]:
        """Returns the names of models and pools that a key may use. Raises as `asks_for_keys`."""
        listed = self._listed(key)
        if listed is None:
            raise WeftError(Reason.UNAUTHENTICATED, f"the mesh at {self.url} does not accept this key")
        try:
            return [name for each in listed["data"] if not (name := str(each["id"])).startswith(_OTHERS)]
        except (KeyError, TypeError) as error:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, f"{self.url} is not a mesh: it lists no models") from error

    def context_tokens(self, key: str, model: str) -> int:
        """Returns the context window of a model; 0: unknown, also if the gateway does not answer."""
        with suppress(WeftError, KeyError, TypeError, ValueError):
            return int(self._get(f"/v1/models/{model}", key)["meta"]["context_tokens"] or 0)
        return 0

    def _get(self, path: str, key: str) -> Any:
        with MeshApi(connection_to(self.url, self.ca_file, CALL_TIMEOUT_SECONDS), self.url, key) as api:
            return api.get(path)

    def _listed(self, key: str) -> Any:
        """Returns the list of models; None if the key is rejected."""
        try:
            return self._get("/v1/models", key)
        except WeftError as error:
            if error.reason in _REFUSED:
                return None
            if error.reason is Reason.SERVICE_UNAVAILABLE:
                error.message += (
                    "; check with weft status whether it runs on this home, or set "
                    f"{URL_VARIABLE} to the URL of another mesh"
                )
            raise


def launch(
    tool: Annotated[
        str,
        typer.Argument(
            metavar="[TOOL]",
            help=f"{', '.join(TOOLS)}. Default: list them.",
            autocompletion=lambda incomplete: [name for name in TOOLS if name.startswith(incomplete)],
            show_default=False,
        ),
    ] = "",
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS...]", help="Arguments of the program.", show_default=False)
    ] = None,
    *,
    model: Annotated[
        str,
        typer.Option(
            help="A model, pool, agent/NAME, route/NAME or alias. Default: the only model of the mesh.",
            autocompletion=complete_chat_target,
        ),
    ] = "",
    key: Annotated[
        str, typer.Option(envvar=KEY_VARIABLE, help="API key. Default: that of the last launch, or a new one.")
    ] = "",
    only_print: Annotated[
        bool, typer.Option("--print", help="Only print the environment as export lines, and the command.")
    ] = False,
    output: Annotated[
        NamedFormat, typer.Option("--output", "-o", help="Output format of the list of tools.")
    ] = NamedFormat.TABLE,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Start a program such as Claude Code with the environment variables of the mesh. No file is changed.

    The mesh is that of --home, of WEFT_URL, or the one that runs on the home.

    If callers need keys and none is given, a key with the role user is created, which expires after 30 days. Later
    launches of the same tool use it too, until a day before it expires or until it is revoked.

    Example: weft launch claude --model qwen3 -- --continue
    """
    if not tool:
        _TABLE.print([_row(name, each) for name, each in TOOLS.items()], output)
        return
    chosen = TOOLS.get(tool)
    if chosen is None:
        raise invalid_field("TOOL", f"must be one of {', '.join(TOOLS)}")
    program = shutil.which(chosen.program)
    if program is None and not only_print:
        raise WeftError(Reason.NOT_FOUND, f"{chosen.title} is not installed; install it: {chosen.install}")
    url = gateway_url(home)
    mesh = HttpMesh(url=url, ca_file=mesh_ca_file(url, home), is_own=url == own_url(home))
    key = key or _key(home, mesh, tool)
    model = model or _only_model(home, mesh, key)
    window = mesh.context_tokens("" if key == ANY_KEY else key, model) if chosen.calls_tools else 0
    access = Access(url=mesh.url, key=key, model=model, context_tokens=window)
    environment = {**chosen.environment(access), **_trust(mesh)}
    command = [chosen.program, *chosen.arguments(access), *(arguments or ())]
    if only_print:
        say(_export_lines(environment, command))
        return
    assert program is not None, "refused above"
    if chosen.calls_tools and mesh.is_own:
        _require_tools(home, chosen, access.model)
    os.execve(program, command, {**os.environ, **environment})  # noqa: S606 - the program that was asked for


def _row(name: str, tool: Tool) -> dict[str, Any]:
    return {
        "tool": name,
        "title": tool.title,
        "installed": shutil.which(tool.program) is not None,
        "install": tool.install,
    }


def _key(home: Path, mesh: HttpMesh, tool: str) -> str:
    """Returns the valid key of a tool's last launch or a new one, if callers need keys."""
    root = WeftHome(home.expanduser().absolute())
    running = root.running() or {}
    # The home's `weft up` has recorded it; other meshes are asked.
    asks = running.get("asksForKeys") if running.get("url") == mesh.url else mesh.asks_for_keys()
    if not asks:
        return ANY_KEY
    if not mesh.is_own:
        raise invalid_field(
            "--key",
            f"is required: callers of {mesh.url} need a key; set it here or in {KEY_VARIABLE}",
        )
    file = root.root / KEY_FOLDER / tool
    if kept := _kept_key(home, file):
        return kept
    wanted = {"description": f"weft launch {tool}", "scopes": list(scopes_of(KeyRole.USER))}
    with connect(home) as api:
        text = str(api.post(KEYS, wanted | {"lifetimeSeconds": KEY_LIFETIME_SECONDS})["key"])
    try:
        replace_file(file, f"{text}\n".encode())
    except OSError as error:
        note(f"the key cannot be stored, so the next launch will create another one: {error.strerror} ({file})")
    return text


def _kept_key(home: Path, file: Path) -> str:
    """Returns the key in a file; empty if it is missing, revoked, or expires within MIN_VALID."""
    try:
        text = file.read_text("utf-8").strip()
    except (OSError, ValueError):
        return ""
    with connect(home) as api:
        good = [
            key
            for key in api.get(KEYS)["items"]
            if key["state"] == "good"
            and ("expireTime" not in key or moment_in(key["expireTime"]) > datetime.now(UTC) + MIN_VALID)
        ]
    return text if any(text.startswith(f"{KEY_PREFIX}_{key['id']}_") for key in good) else ""


def _only_model(home: Path, mesh: HttpMesh, key: str) -> str:
    """Returns the only model. Raises INVALID_ARGUMENT listing the models if there are several."""
    if mesh.is_own:
        with connect(home) as registry:
            names = list(registry.names(ResourceKind.POOL))
    else:
        names = mesh.models("" if key == ANY_KEY else key)
    if len(names) == 1:
        return names[0]
    there = f"there are {', '.join(names[:MAX_NAMES])}" if names else "the mesh has none yet"
    raise invalid_field("--model", f"choose a model; {there}")


def _require_tools(home: Path, tool: Tool, model: str) -> None:
    """Raises INVALID_ARGUMENT if all models that may answer are known not to call tools."""
    models: list[Document] = []
    with suppress(WeftError), connect(home) as registry:
        models = registry.documents(ResourceKind.MODEL)
    members = [each for each in models if model in {each["name"], each.get("status", {}).get("pool")}]
    if not members or not all("tools" in _abilities(each).get("lacking", ()) for each in members):
        return
    able = sorted(each["name"] for each in models if "tools" in _abilities(each).get("skills", ()))
    others = (
        f"these do: {', '.join(able[:MAX_NAMES])}"
        if able
        else "load one that does, such as hf:Qwen/Qwen3-4B-GGUF (weft load)"
    )
    raise invalid_field("--model", f"{model} does not support tool calls, which {tool.title} needs; {others}")


def _abilities(model: Document) -> Mapping[str, Any]:
    return dict(model.get("status", {}).get("instance", {}).get("abilities", {}))


def _trust(mesh: HttpMesh) -> dict[str, str]:
    """Returns variables that make a program trust the mesh's own certificate, or that of WEFT_CA_FILE."""
    if mesh.ca_file is None or not mesh.url.startswith("https:"):
        return {}
    return {name: str(mesh.ca_file) for name in ("NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE")}


def _export_lines(environment: Mapping[str, str], command: list[str]) -> str:
    """Returns shell lines, with the command as a comment so that they can be evaluated."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join([*lines, f"# {shlex.join(command)}", ""])
