"""`weft runner`: join a mesh from behind any NAT, and the tokens that permit it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from weft.kernel.machine.hidden_argument import hide_argument
from weft_app.cli.network_options import Discover
from weft_app.cli.options import DEFAULT_HOME, ConfigOption, HomeOption
from weft_app.cli.serving import serving
from weft_app.cli.terminal import note

URL_VARIABLE = "WEFT_JOIN_URL"
TOKEN_VARIABLE = "WEFT_JOIN_TOKEN"  # noqa: S105 - the variable's name

INVITATION = "weft://"

app = typer.Typer()


TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar=TOKEN_VARIABLE,
        help="Join token; on Linux it is removed from the process list immediately. Prefer --token-file elsewhere.",
    ),
]
RunnerOption = Annotated[str | None, typer.Option("--runner", help="Name of the runner in the configuration.")]
ModelOption = Annotated[
    str | None, typer.Option("--model", help="With --url: name of a single model. Default: all models that it lists.")
]


@app.command("join")
def join(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]",
            envvar=URL_VARIABLE,
            show_envvar=False,
            help="Invitation of the mesh, weft://..., or the address of its relay, https://host:port. Default: the "
            "environment variable WEFT_JOIN_URL, else a mesh that is announced on this network.",
            show_default=False,
        ),
    ] = None,
    *,
    token: TokenOption = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="File that holds the join token.")] = None,
    ca_file: Annotated[
        Path | None, typer.Option("--ca-file", help="PEM file of the root certificates of the mesh.")
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            "--fingerprint",
            help="Fingerprint (sha256:...) of the mesh's certificate if it is self-signed; "
            "without a URL, of the announced mesh.",
        ),
    ] = None,
    runner: RunnerOption = None,
    publish: Annotated[
        list[str] | None, typer.Option("--publish", help="Also publish this model of the runner; repeatable.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="With --url: name of the runner. Default: the machine's name.")
    ] = None,
    server_url: Annotated[
        str | None, typer.Option("--url", help="Publish an OpenAI-compatible server; the mesh never learns its URL.")
    ] = None,
    model: ModelOption = None,
    upstream_model: Annotated[
        str | None, typer.Option("--upstream-model", help="With --url: name of the model on the server.")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option("--api-key-env", help="With --url: environment variable that contains the server's API key."),
    ] = None,
    remote: Annotated[
        bool | None, typer.Option("--remote/--no-remote", help="With --url: whether its models are remote.")
    ] = None,
    accept_models: Annotated[
        bool,
        typer.Option(
            "--accept-models",
            help="Let the mesh download models of the hub (hf:...) to this machine and serve them, with its HF_TOKEN.",
        ),
    ] = False,
    discover: Annotated[
        Discover | None,
        typer.Option(
            help="Without weft.yaml and --url: publish a running engine of this machine. Default: ask on a terminal.",
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

    Without a URL it looks for meshes that are announced on this network (weft up --announce), and asks which one to
    join, for its invitation or token, and to confirm its fingerprint.

    Example: weft runner join https://mesh.example:7443 --url http://127.0.0.1:11434
    """
    # First, because other users can read the process list until then.
    for secret in (token, (url or "").partition(INVITATION)[2].partition("@")[0]):
        if secret and not hide_argument(secret):
            note("other users of this machine can read the token in the process list; give it by --token-file")
    with serving():
        from weft_app.cli.join import Credentials, run_join  # noqa: PLC0415 - see weft_app.cli.serve

        credentials = Credentials(token=token, token_file=token_file, ca_file=ca_file, fingerprint=fingerprint)
        server: dict[str, Any] = {"name": name, "url": server_url, "model": model}
        server |= {"upstream_model": upstream_model, "api_key_env": api_key_env, "remote": remote}
        run_join(
            url,
            credentials,
            runner=runner,
            publish=publish or (),
            server=server,
            accepts_models=accept_models,
            discover=discover,
            home=home,
            config=config,
        )
