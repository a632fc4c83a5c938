"""`weft serve <service>`: one service in this process.

Each command imports its own service when it runs: a runner host has neither the web stack nor the database installed.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.kernel.log import get_logger
from weft.kernel.memory_tuning import large_imports
from weft.kernel.telemetry import configure_logging
from weft_app.cli.inherited import leave_deleted_folder
from weft_app.cli.options import DEFAULT_HOME, ConfigOption, HomeOption
from weft_app.cli.output import say
from weft_app.cli.serving import run_service, serving
from weft_app.compose.configuration import ConfigurationSource
from weft_app.compose.discovery import discovered_runners
from weft_app.compose.environment import LogFormat, RunnerEnvironment, read_environment, with_rates
from weft_app.compose.home import RUNNER_FILE, WeftHome, keep_address
from weft_app.compose.serving import Announce
from weft_app.config.config import WeftConfig
from weft_app.config.document import Document

if TYPE_CHECKING:
    from weft_app.compose.runner import MakeHttpApi

log = get_logger("weft_app.compose")

app = typer.Typer(
    help="Run one service of a mesh in this process, for meshes that span processes or machines.",
    epilog="Example: weft serve registry --listen 127.0.0.1:7070",
    no_args_is_help=True,
)

ListenOption = Annotated[
    str | None, typer.Option("--listen", help="gRPC address, such as unix:/run/weft/x.sock or 127.0.0.1:7070.")
]
RegistryOption = Annotated[
    str | None, typer.Option("--registry", help="gRPC target of the registry; several with commas between them.")
]
MetricsOption = Annotated[
    str | None,
    typer.Option("--metrics", help="Also serve /metrics here, without keys: such as 127.0.0.1:9464, or unix:/path."),
]
RouterOption = Annotated[str | None, typer.Option("--router", help="gRPC target of the router.")]


@app.command("registry")
def serve_registry(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    listen: ListenOption = None,
    metrics: MetricsOption = None,
) -> None:
    """Run the registry: declarations, sessions and heartbeats of runners.

    Example: weft serve registry --listen 127.0.0.1:7070 --metrics 127.0.0.1:9464
    """
    with serving():
        loaded, folder = _prepare("registry", home, config, {}, _metrics_at(metrics))
        with large_imports():
            from weft_app.compose.registry import serve_registry as run  # noqa: PLC0415 - see the module docstring

        with _known(loaded, folder, "registry") as announce:
            run_service(run(loaded, folder, listen, announce))


@app.command("router")
def serve_router(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    listen: ListenOption = None,
    registry: RegistryOption = None,
    metrics: MetricsOption = None,
) -> None:
    """Run a router: the scheduler and the public gRPC API.

    Example: weft serve router --registry 127.0.0.1:7070 --listen 127.0.0.1:7071
    """
    with serving():
        rates = partial(with_rates, environment=os.environ)
        given = _metrics_at(metrics)
        loaded, folder = _prepare("router", home, config, {"registry": registry}, given, below=rates)
        with large_imports():
            from weft_app.compose.router import serve_router as run  # noqa: PLC0415 - see the module docstring

        with _known(loaded, folder, "router") as announce:
            run_service(run(loaded, folder, listen, announce))


@app.command("gateway")
def serve_gateway(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="HTTP port; 0 takes a free one.")] = None,
    registry: RegistryOption = None,
    router: RouterOption = None,
    metrics: MetricsOption = None,
) -> None:
    """Run a gateway: the OpenAI-compatible HTTP API.

    Example: weft serve gateway --registry 127.0.0.1:7070 --router 127.0.0.1:7071 --port 8080
    """
    with serving():
        overrides = _metrics_at(metrics) if port is None else {"port": port, **_metrics_at(metrics)}
        loaded, folder = _prepare("gateway", home, config, {"registry": registry, "router": router}, overrides)
        with large_imports():
            from weft_app.compose.gateway import serve_gateway as run  # noqa: PLC0415 - see the module docstring

        with _known(loaded, folder, "gateway") as announce:
            run_service(run(loaded, folder, announce))


@app.command("runner")
def serve_runner(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    listen: ListenOption = None,
    registry: RegistryOption = None,
    metrics: MetricsOption = None,
    *,
    runner: Annotated[str | None, typer.Option("--runner", help="Which runner of the configuration.")] = None,
    http_port: Annotated[
        int | None, typer.Option("--http-port", min=0, max=65_535, help="Also serve its HTTP API here; 0: a free port.")
    ] = None,
    no_demo: Annotated[
        bool, typer.Option("--no-demo", help="Without a configuration serve no demo model, but those that were added.")
    ] = False,
    discovered: Annotated[
        bool, typer.Option("--discovered", help="Without a configuration serve what weft up has found on this machine.")
    ] = False,
) -> None:
    """Run a runner: the engines of one runtime on this host.

    Example: weft serve runner --config weft.yaml --runner gpu-0 --registry 127.0.0.1:7070
    """
    with serving():
        name = f"{RUNNER_FILE}{runner}" if runner else "runner"
        environment = read_environment(os.environ)
        form, below = environment.log_format, environment.applied_to
        runners: Callable[[], Sequence[Document]] | None = tuple if no_demo else None
        if discovered:
            runners = partial(discovered_runners, WeftHome(home.expanduser().absolute()))
        given, addresses = _metrics_at(metrics), {"registry": registry}
        loaded, folder = _prepare(name, home, config, addresses, given, below=below, form=form, runners=runners)
        _say_what_is_ignored(environment, loaded)
        with large_imports():
            from weft_app.compose.runner import serve_runner as run  # noqa: PLC0415 - see the module docstring

        http_api = _http_api(loaded, folder, environment, runner, http_port)
        reread = _source(config, addresses, below=below, runners=runners).load
        with _known(loaded, folder, name, "runner") as announce:
            run_service(run(loaded, folder, listen, announce, name=runner, make_http_api=http_api, reread=reread))


@app.command("central")
def serve_central(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    listen: ListenOption = None,
    registry: RegistryOption = None,
    metrics: MetricsOption = None,
) -> None:
    """Run the runner of central models: those that `weft create model` declares. `weft up` runs it when it is needed.

    Of several, one serves, and the others wait for its end.

    Example: weft serve central --registry 127.0.0.1:7070
    """
    with serving():
        loaded, folder = _prepare("runner-central-models", home, config, {"registry": registry}, _metrics_at(metrics))
        with large_imports():
            from weft_app.compose.central import serve_central as run  # noqa: PLC0415 - see the module docstring

        with _known(loaded, folder, "runner-central-models", "central") as announce:
            run_service(run(loaded, folder, listen, announce))


def _http_api(
    config: WeftConfig, home: WeftHome, environment: RunnerEnvironment, runner: str | None, http_port: int | None
) -> "MakeHttpApi | None":
    """Builds the HTTP API of the runner; None where it has none."""
    from weft_app.compose.demo import configured_runners  # noqa: PLC0415 - see the module docstring
    from weft_app.compose.edge_certificate import with_edge_certificate  # noqa: PLC0415
    from weft_app.compose.runner import pick_runner  # noqa: PLC0415
    from weft_app.compose.serving import registry_address  # noqa: PLC0415

    section = pick_runner(configured_runners(config), runner)
    port = section.http_port if http_port is None else http_port
    if port is None:
        return None
    from weft_app.compose.runner_http import RunnerHttp, RunnerHttpPlan  # noqa: PLC0415

    plan = RunnerHttpPlan(
        config=with_edge_certificate(config, home),
        environment=environment,
        section=section,
        registry_address=registry_address(config, home),
        port=port,
    )
    return partial(RunnerHttp, plan)


def _metrics_at(listen: str | None) -> dict[str, Any]:
    """Returns the settings that `--metrics` overrides."""
    return {} if listen is None else {"metrics": {"listen": listen or None}}


def _say_what_is_ignored(environment: RunnerEnvironment, config: WeftConfig) -> None:
    for variable, why in environment.ignored_by(config):
        log.warning("environment variable changes nothing", variable=variable, why=why)


def _prepare(
    service: str,
    home: Any,
    config: Any,
    addresses: dict[str, str | None],
    overrides: dict[str, Any] | None = None,
    *,
    below: Callable[[Document], Document] | None = None,
    form: LogFormat | None = None,
    runners: Callable[[], Sequence[Document]] | None = None,
) -> tuple[WeftConfig, WeftHome]:
    loaded = _source(config, addresses, overrides, below=below, runners=runners).load()
    folder = WeftHome(home.expanduser().absolute())
    folder.create()
    leave_deleted_folder(folder.root)
    # On a terminal the log goes there; everywhere else to the file under the home, where people look for it.
    log_file = None if sys.stderr.isatty() else folder.log_file(service, loaded.log.max_file_bytes)
    configure_logging(service, level=loaded.log.level, file=log_file, form=form)
    return loaded, folder


def _source(
    config: Path | None, addresses: dict[str, str | None], overrides: dict[str, Any] | None = None, **layers: Any
) -> ConfigurationSource:
    given = {name: address for name, address in addresses.items() if address is not None}
    return ConfigurationSource(path=config, overrides={**(overrides or {}), "addresses": given}, **layers)


@contextmanager
def _known(config: WeftConfig, home: WeftHome, file_name: str, service: str | None = None) -> Iterator[Announce]:
    """Yields what announces the addresses of a service; the first is in a file of the home until the block ends.

    So are the configured addresses of registry and router.
    """
    file = home.address_file(file_name)
    configured = {"registry": config.addresses.registry, "router": config.addresses.router}
    targets = {home.target_file(file_name, name): address for name, address in configured.items()}
    announced: list[str] = []

    def announce(address: str) -> None:
        if not announced:
            keep_address(file, address)
        announced.append(address)
        _announce(service or file_name)(address)

    try:
        # Before the service begins: it may wait for its database, and commands must find the registry meanwhile.
        for target, address in targets.items():
            keep_address(target, address)
        yield announce
    finally:
        for each in (file, *targets):
            keep_address(each, None)


def _announce(service: str) -> Announce:
    def announce(address: str) -> None:
        say(f"{service} serves at {address}\n")

    return announce
