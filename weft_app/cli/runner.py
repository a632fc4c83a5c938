"""`weft runner`: join a mesh from behind any NAT, and the tokens that permit it."""

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.cli import join_tokens
from weft_app.cli.discover import Discover
from weft_app.cli.options import DEFAULT_HOME, EXIT_FAILED, EXIT_INTERRUPTED, ConfigOption, HomeOption, note
from weft_app.cli.output import safe_text, say
from weft_app.cli.serving import run_service, serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner_svc.dial_out import LinkEvent
    from weft_app.compose.invitation import Invitation
    from weft_app.compose.join import JoinPlan
    from weft_app.compose.join_address import FindAddresses
    from weft_app.config.config import WeftConfig
    from weft_app.config.document import Document

MAX_TOKEN_CHARS = 256
URL_VARIABLE = "WEFT_JOIN_URL"
TOKEN_VARIABLE = "WEFT_JOIN_TOKEN"  # noqa: S105 - the variable's name

app = typer.Typer(help="Join a mesh with the models of this machine, and manage join tokens.", no_args_is_help=True)
app.add_typer(join_tokens.app, name="token")


UrlArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[URL]",
        envvar=URL_VARIABLE,
        show_envvar=False,
        help="The invitation that the mesh shows, weft://..., or where runners join, https://host:port. "
        "Default: the variable WEFT_JOIN_URL, then a mesh that is announced on this network.",
        show_default=False,
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option("--token", envvar=TOKEN_VARIABLE, help="The join token; others on this machine can see it here."),
]
TokenFileOption = Annotated[Path | None, typer.Option("--token-file", help="File that holds the join token.")]
CaFileOption = Annotated[Path | None, typer.Option("--ca-file", help="PEM file of the root certificates of the mesh.")]
FingerprintOption = Annotated[
    str | None,
    typer.Option(
        "--fingerprint",
        help="sha256:... of the mesh's certificate, when it is self-signed. Without a URL: of the announced mesh.",
    ),
]
RunnerOption = Annotated[str | None, typer.Option("--runner", help="Which runner of the configuration.")]
PublishOption = Annotated[
    list[str] | None, typer.Option("--publish", help="Also publish this model of the runner; repeatable.")
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="With --url: the runner's name. Default: the machine's.")
]
ServerUrlOption = Annotated[
    str | None, typer.Option("--url", help="Publish an OpenAI-compatible server; the mesh never learns its URL.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="With --url: name of its one model. Default: all it lists.")
]
UpstreamOption = Annotated[
    str | None, typer.Option("--upstream-model", help="With --url: the server's own name of the model.")
]
KeyVariableOption = Annotated[
    str | None, typer.Option("--api-key-env", help="With --url: environment variable of the server's key.")
]
RemoteOption = Annotated[
    bool | None,
    typer.Option("--remote/--no-remote", help="With --url: whether its models are remote."),
]


@app.command("join")
def join(
    url: UrlArgument = None,
    *,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    ca_file: CaFileOption = None,
    fingerprint: FingerprintOption = None,
    runner: RunnerOption = None,
    publish: PublishOption = None,
    name: NameOption = None,
    server_url: ServerUrlOption = None,
    model: ModelOption = None,
    upstream_model: UpstreamOption = None,
    api_key_env: KeyVariableOption = None,
    remote: RemoteOption = None,
    discover: Annotated[
        Discover | None,
        typer.Option(
            "--discover",
            help="Without weft.yaml and --url: publish an engine that runs here. Default: ask on a terminal.",
            show_default=False,
        ),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
) -> None:
    """Join a mesh: one outbound connection, no open port. Serves until Ctrl-C.

    Without a configuration it publishes all models of an engine that runs on this machine, or at --url; otherwise
    models with `publish: true` in the configuration, and those named with --publish.

    A provider's model is one of a runner with `runtime: openai_remote`, see docs/models.md.

    Without a URL it looks for meshes that are announced on this network (weft up --announce), and asks which one, for
    the invitation or its token, and whether the fingerprint is the mesh's.

    Example: weft runner join https://mesh.example:7443 --url http://127.0.0.1:11434
    """
    with serving():
        from weft_app.compose.environment import read_environment  # noqa: PLC0415
        from weft_app.compose.join import JoinPlan, pick_published  # noqa: PLC0415 - see weft_app.cli.serve

        find: FindAddresses | None = None
        if url is None:
            mesh, find = _announced(token, token_file, ca_file, fingerprint)
        else:
            mesh = _mesh(url, token, token_file, ca_file, fingerprint)
        server = {"name": name, "url": server_url, "model": model}
        details = {"upstream_model": upstream_model, "api_key_env": api_key_env, "remote": remote}
        if server_url is None and not publish:
            server["url"] = _found_server(config, home, discover)
        loaded = _load(config, server, details, read_environment(os.environ).applied_to)
        section, published = pick_published(loaded, runner, publish or [])
        if section.http_port is not None:
            say("note: a runner that joins over a link has no HTTP API; its http_port is ignored\n")
        plan = JoinPlan(
            runner=section,
            published=tuple(published),
            mesh=mesh,
            find=find,
        )
        _run(plan, loaded, home)


def _found_server(config: Path | None, home: Path, mode: Discover | None) -> str | None:
    """Returns the URL of an engine of this machine to publish; None where a configuration has runners.

    On a terminal it is asked for; elsewhere --discover=yes or --url decide. Raises INVALID_ARGUMENT with the way out.
    """
    from weft_app.cli.discover import shown_server  # noqa: PLC0415 - see weft_app.cli.serve
    from weft_app.compose.discovery import discover as look  # noqa: PLC0415
    from weft_app.compose.home import WeftHome  # noqa: PLC0415
    from weft_app.config.loader import load_config  # noqa: PLC0415

    loaded = load_config(config)
    if loaded.runners is not None:
        return None
    found = asyncio.run(look(loaded.discovery, WeftHome(home.expanduser().absolute())))
    usable = [] if mode is Discover.NO else [server for server in found.servers if not server.why_empty]
    if not usable:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            "there is nothing to publish: no weft.yaml with runners, and no engine that answers on this machine; "
            "name one with --url http://HOST:PORT, or write a weft.yaml (docs/laptops.md)",
        )
    chosen = usable[0]
    for server in usable[1:]:
        note(f"also found, and not published: {shown_server(server)}; publish it with --url {server.url}")
    note(f"found on this machine: {shown_server(chosen)}")
    if mode is not Discover.YES:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise WeftError(
                Reason.INVALID_ARGUMENT, f"add --discover=yes or --url {chosen.url} to publish all of its models"
            )
        _require_consent()
    return chosen.url


def _require_consent() -> None:
    """Ends the command unless the user agrees."""
    try:
        agreed = typer.confirm("weft: publish all of its models in the mesh?", default=True, err=True)
    except typer.Abort:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if not agreed:
        raise typer.Exit(EXIT_FAILED)


def _machine_name() -> str:
    from weft_app.compose.machine import this_machine  # noqa: PLC0415 - see weft_app.cli.serve

    return (*this_machine().names, "laptop")[0].partition(".")[0]


def _load(
    config: Path | None,
    server: dict[str, str | None],
    details: dict[str, Any],
    environment: "Callable[[Document], Document]",
) -> "WeftConfig":
    """Returns the configuration file, or the one server that the command line names."""
    from weft_app.compose.join import config_with_server  # noqa: PLC0415
    from weft_app.config.loader import load_config  # noqa: PLC0415 - see weft_app.cli.serve

    if server["url"] is None:
        for name, value in {**server, **details}.items():
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                raise invalid_field(option, "is for --url; models of the configuration have their own names")
        return load_config(config, below=environment)
    return config_with_server(
        config,
        runner=server["name"] or _machine_name(),
        url=server["url"],
        model=server["model"],
        below=environment,
        **details,
    )


def _run(plan: "JoinPlan", config: "WeftConfig", home: Path) -> None:
    from weft.kernel.telemetry import configure_logging  # noqa: PLC0415
    from weft_app.compose.home import WeftHome  # noqa: PLC0415
    from weft_app.compose.join import join as join_mesh  # noqa: PLC0415

    folder = WeftHome(home.expanduser().absolute())
    folder.create()
    log_file = folder.log_file(f"runner-{plan.runner.name}", config.log.max_file_bytes)
    configure_logging("runner", level=config.log.level, file=log_file)
    logs = folder.logs / f"runner-{plan.runner.name}.log"
    say(f"runner {plan.runner.name} joins {plan.shown_address}; logs: {logs}\n")
    _warn_of_missing_models(plan)
    run_service(join_mesh(plan, config, folder, LinkReporter(plan).show))
    say("stopped\n")


def _warn_of_missing_models(plan: "JoinPlan") -> None:
    """Warns of models that cannot be served yet: the runner joins, and serves them once their server has them."""
    if plan.runner.follows_server:
        from weft_app.compose.followed_servers import list_of_followed, why_none_served  # noqa: PLC0415 - see _run

        found = asyncio.run(list_of_followed(plan.runner))
        if found is not None and not (found.models and found.models.names):
            say(f"warn {plan.runner.name}: {why_none_served(found)}\n")
    find_fault = plan.runner.engine.find_fault
    if find_fault is None:
        return
    for model in plan.runner.models:
        fault = find_fault(model, os.environ) if model.name in plan.published else None
        if fault is not None:
            remedy = "" if fault.is_there else f"; {fault.remedy}"
            say(f"warn {model.name}: {fault.message}{remedy}\n")


class LinkReporter:
    """Shows the state of the link: one line per change."""

    def __init__(self, plan: "JoinPlan") -> None:
        self._plan = plan
        self._last = ""

    def show(self, event: "LinkEvent") -> None:
        """Shows a new state of the link."""
        line = self._line(event)
        if line and line != self._last:
            say(f"{line}\n")
        self._last = line or self._last

    def _line(self, event: "LinkEvent") -> str:
        detail = safe_text(event.detail)
        match event.state.name:
            case "CONNECTING":
                return f"...  connecting to {self._plan.shown_address}"
            case "JOINED":
                models = ", ".join(self._plan.published) or "every model that its server lists"
                return f"ok   joined as {self._plan.runner.name}: {models}"
            case "REFUSED":
                return f"fail refused: {detail}; trying again"
            case "LOST":
                return f"fail no link: {detail}; trying again in {event.retry_seconds or 0.0:.1f} s"
            case _:
                return ""


def _mesh(
    url: str, token: str | None, token_file: Path | None, ca_file: Path | None, fingerprint: str | None
) -> "Invitation":
    """Returns the mesh to join: that of an invitation, or the one that the options describe."""
    from weft_app.compose.invitation import SCHEME, Invitation, parse_invitation  # noqa: PLC0415 - see weft_app.cli.serve
    from weft_app.compose.join_address import parse_join_address, parse_trust  # noqa: PLC0415

    if not url.startswith(SCHEME):
        address = parse_join_address(url)
        trust = parse_trust(address, ca_file, fingerprint)
        return Invitation(addresses=(address,), trust=trust, token=_read_token(token, token_file))
    for option, value in (("--token-file", token_file), ("--ca-file", ca_file), ("--fingerprint", fingerprint)):
        if value is not None:
            raise invalid_field(option, "is part of the invitation; leave it out")
    return parse_invitation(url)


def _announced(
    token: str | None, token_file: Path | None, ca_file: Path | None, fingerprint: str | None
) -> "tuple[Invitation, FindAddresses | None]":
    """Returns the announced mesh to join, and what finds it again."""
    from weft_app.cli.announced import announced_mesh  # noqa: PLC0415 - see weft_app.cli.serve

    if ca_file is not None:
        raise invalid_field("--ca-file", "needs the URL of the mesh, whose name the certificate is for")
    given = _read_token(token, token_file) if token or token_file else ""
    return announced_mesh(fingerprint, lambda: given or _read_token(token, token_file), given)


def _read_token(token: str | None, token_file: Path | None) -> str:
    if token_file is not None:
        try:
            token = token_file.expanduser().read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise invalid_field("--token-file", f"{token_file} cannot be read as text") from error
    if not token:
        raise invalid_field(
            "--token", f"is needed, or --token-file, or {TOKEN_VARIABLE}; make one with `weft runner token create`"
        )
    if len(token) > MAX_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise invalid_field("--token", "is not a join token; it looks like wjt_<id>_<secret>")
    return token
