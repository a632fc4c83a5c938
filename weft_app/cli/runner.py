"""`weft runner`: join a mesh from behind any NAT, and the tokens that permit it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.kernel.errors import invalid_field
from weft_app.cli import join_tokens
from weft_app.cli.options import DEFAULT_HOME, ConfigOption, HomeOption
from weft_app.cli.output import safe_text, say
from weft_app.cli.serving import serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner_svc.dial_out import LinkEvent
    from weft_app.compose.join import JoinPlan
    from weft_app.config.config import WeftConfig
    from weft_app.config.document import Document

MAX_TOKEN_CHARS = 256
TOKEN_VARIABLE = "WEFT_JOIN_TOKEN"  # noqa: S105 - the variable's name

app = typer.Typer(help="Join a mesh with the models of this machine, and manage join tokens.", no_args_is_help=True)
app.add_typer(join_tokens.app, name="token")


UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="Where the mesh lets runners join, https://host:port.")]
TokenOption = Annotated[
    str | None,
    typer.Option("--token", envvar=TOKEN_VARIABLE, help="The join token; others on this machine can see it here."),
]
TokenFileOption = Annotated[Path | None, typer.Option("--token-file", help="File that holds the join token.")]
CaFileOption = Annotated[Path | None, typer.Option("--ca-file", help="PEM file of the root certificates of the mesh.")]
FingerprintOption = Annotated[
    str | None, typer.Option("--fingerprint", help="sha256:... of the mesh's certificate, when it is self-signed.")
]
RunnerOption = Annotated[str | None, typer.Option("--runner", help="Which runner of the configuration.")]
PublishOption = Annotated[
    list[str] | None, typer.Option("--publish", help="Also publish this model of the runner; repeatable.")
]
NameOption = Annotated[str | None, typer.Option("--name", help="With --url: name of the runner in the mesh.")]
ServerUrlOption = Annotated[
    str | None, typer.Option("--url", help="Publish an OpenAI-compatible server; the mesh never learns its URL.")
]
ModelOption = Annotated[str | None, typer.Option("--model", help="With --url: name of its model in the mesh.")]
UpstreamOption = Annotated[
    str | None, typer.Option("--upstream-model", help="With --url: the server's own name of the model.")
]
KeyVariableOption = Annotated[
    str | None, typer.Option("--api-key-env", help="With --url: environment variable of the server's key.")
]
RemoteOption = Annotated[
    bool | None,
    typer.Option("--remote/--no-remote", help="With --url: whether requests to it leave the premises."),
]


@app.command("join")
def join(
    url: UrlArgument,
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
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
) -> None:
    """Join a mesh: one outbound connection, no open port. Serves until Ctrl-C.

    Published are models with `publish: true` in the configuration, and those named with --publish.

    A provider's model is one of a runner with `runtime: openai_remote`, see docs/remote.md.

    Example: weft runner join https://mesh.example:7443 --name laptop --url http://127.0.0.1:11434/v1 --model llama
    """
    with serving():
        from weft_app.compose.environment import read_environment  # noqa: PLC0415
        from weft_app.compose.join import JoinPlan, parse_join_address, parse_trust, pick_published  # noqa: PLC0415 - see weft_app.cli.serve  # noqa: PLC0415

        address = parse_join_address(url)
        trust = parse_trust(address, ca_file, fingerprint)
        secret = _read_token(token, token_file)
        server = {"name": name, "url": server_url, "model": model}
        details = {"upstream_model": upstream_model, "api_key_env": api_key_env, "remote": remote}
        loaded = _load(config, server, details, read_environment(os.environ).applied_to)
        section, published = pick_published(loaded, runner, publish or [])
        if section.http_port is not None:
            say("note: a runner that joins over a link has no HTTP API of its own; its http_port changes nothing\n")
        plan = JoinPlan(runner=section, published=tuple(published), address=address, trust=trust, token=secret)
        _run(plan, loaded, home, url)


def _load(
    config: Path | None,
    server: dict[str, str | None],
    details: dict[str, Any],
    environment: "Callable[[Document], Document]",
) -> "WeftConfig":
    """Returns the configuration file, or the one server that the command line names."""
    from weft_app.compose.join import ServerOptions, config_with_server  # noqa: PLC0415
    from weft_app.config.loader import load_config  # noqa: PLC0415 - see weft_app.cli.serve

    if server["url"] is None:
        for name, value in {**server, **details}.items():
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                raise invalid_field(option, "is for --url; models of the configuration have names of their own")
        return load_config(config, below=environment)
    given = ServerOptions(
        runner=_required("--name", server["name"]),
        url=server["url"],
        model=_required("--model", server["model"]),
        **details,
    )
    return config_with_server(config, given, environment)


def _run(plan: "JoinPlan", config: "WeftConfig", home: Path, url: str) -> None:
    import uvloop  # noqa: PLC0415 - see weft_app.cli.serve

    from weft.kernel.telemetry import configure_logging  # noqa: PLC0415
    from weft_app.compose.home import WeftHome  # noqa: PLC0415
    from weft_app.compose.join import join as join_mesh  # noqa: PLC0415

    folder = WeftHome(home.expanduser().absolute())
    folder.create()
    log_file = folder.log_file(f"runner-{plan.runner.name}", config.log.max_file_bytes)
    configure_logging("runner", level=config.log.level, file=log_file)
    say(f"runner {plan.runner.name} joins {url}; logs: {folder.logs / f'runner-{plan.runner.name}.log'}\n")
    _warn_of_other_models(plan)
    uvloop.run(join_mesh(plan, config, folder, LinkReporter(plan).show))
    say("stopped\n")


def _warn_of_other_models(plan: "JoinPlan") -> None:
    """Warns where a server has other models than the one to publish: the runner joins, the model is not ready."""
    find_fault = plan.runner.engine.find_fault
    if find_fault is None:
        return
    for model in plan.runner.models:
        fault = find_fault(model, os.environ) if model.name in plan.published else None
        if fault is not None and fault.is_there:
            say(f"warn {model.name}: {fault.message}\n")


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
                return f"...  connecting to {self._plan.address.target}"
            case "JOINED":
                return f"ok   joined as {self._plan.runner.name}: {', '.join(self._plan.published)}"
            case "REFUSED":
                return f"fail refused: {detail}; trying again"
            case "LOST":
                return f"fail no link: {detail}; trying again in {event.retry_seconds or 0.0:.1f} s"
            case _:
                return ""


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


def _required(option: str, value: str | None) -> str:
    if not value:
        raise invalid_field(option, "is needed with --url")
    return value
