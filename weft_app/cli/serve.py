"""`weft serve <service>`: one service in this process.

Each command imports its own service when it runs: a runner host has neither the web stack nor the database installed.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.kernel.machine.memory_tuning import large_imports
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.structured_logs import configure_logging
from weft_app.cli.inherited import leave_deleted_folder
from weft_app.cli.options import DEFAULT_HOME, ConfigOption, HomeOption
from weft_app.cli.serving import run_service, serving
from weft_app.cli.terminal import is_err_terminal, say
from weft_app.compose.configuration import ConfigurationSource
from weft_app.compose.discovery import discovered_runners
from weft_app.compose.environment import LogFormat, RunnerEnvironment, read_environment, with_rates
from weft_app.compose.home import RUNNER_FILE, WeftHome, keep_address, kept_address
from weft_app.compose.serving import Announce
from weft_app.config.config import WeftConfig

if TYPE_CHECKING:
    from weft_app.compose.runner import MakeHttpApi

log = get_logger("weft_app.compose")

app = typer.Typer()

ListenOption = Annotated[
    str | None, typer.Option("--listen", help="gRPC address, such as unix:/run/weft/x.sock or 127.0.0.1:7070.")
]
RegistryOption = Annotated[
    str | None, typer.Option("--registry", help="gRPC address of the registry; several separated by commas.")
]
MetricsOption = Annotated[
    str | None,
    typer.Option("--metrics", help="Also serve /metrics here, such as 127.0.0.1:9464, or unix:/path."),
]


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
    with _service("registry", home, config, {}, _metrics_at(metrics)) as (loaded, folder, announce):
        with large_imports():
            from weft_app.compose.registry import serve_registry as run  # noqa: PLC0415 - see the module docstring

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
    below, given = partial(with_rates, environment=os.environ), {"registry": registry}
    with _service("router", home, config, given, _metrics_at(metrics), below=below) as (loaded, folder, announce):
        with large_imports():
            from weft_app.compose.router import serve_router as run  # noqa: PLC0415 - see the module docstring

        run_service(run(loaded, folder, listen, announce))


@app.command("gateway")
def serve_gateway(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="HTTP port; 0 picks a free one.")] = None,
    registry: RegistryOption = None,
    router: Annotated[str | None, typer.Option("--router", help="gRPC address of the router.")] = None,
    metrics: MetricsOption = None,
) -> None:
    """Run a gateway: the OpenAI-compatible HTTP API.

    Example: weft serve gateway --registry 127.0.0.1:7070 --router 127.0.0.1:7071 --port 8080
    """
    overrides = _metrics_at(metrics) if port is None else {"port": port, **_metrics_at(metrics)}
    given = {"registry": registry, "router": router}
    with _service("gateway", home, config, given, overrides) as (loaded, folder, announce):
        with large_imports():
            from weft_app.compose.gateway import serve_gateway as run  # noqa: PLC0415 - see the module docstring

        run_service(run(loaded, folder, announce))


@app.command("runner")
def serve_runner(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    listen: ListenOption = None,
    registry: RegistryOption = None,
    metrics: MetricsOption = None,
    *,
    runner: Annotated[str | None, typer.Option(help="Name of the runner in the configuration.")] = None,
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Also serve its HTTP API here; 0: a free port.")
    ] = None,
    no_demo: Annotated[
        bool, typer.Option("--no-demo", help="Without a configuration, serve only added models, not the demo model.")
    ] = False,
    discovered: Annotated[
        bool,
        typer.Option(
            "--discovered", help="Without a configuration, serve the models that weft up has found on this machine."
        ),
    ] = False,
) -> None:
    """Run a runner: the engines of one runtime on this host.

    Example: weft serve runner --config weft.yaml --runner gpu-0 --registry 127.0.0.1:7070
    """
    name = f"{RUNNER_FILE}{runner}" if runner else "runner"
    environment, given = read_environment(os.environ), {"registry": registry}
    layers: dict[str, Any] = {"below": environment.applied_to, "runners": tuple if no_demo else None}
    if discovered:
        layers["runners"] = partial(discovered_runners, WeftHome(home.expanduser().absolute()))
    asked = {"service": "runner", "form": environment.log_format, **layers}
    with _service(name, home, config, given, _metrics_at(metrics), **asked) as (loaded, folder, announce):
        for variable, why in environment.ignored_by(loaded):
            log.warning("environment variable has no effect", variable=variable, why=why)
        with large_imports():
            from weft_app.compose.runner import serve_runner as run  # noqa: PLC0415 - see the module docstring

        http_api = _http_api(loaded, folder, environment, runner, http_port)
        source = _source(config, given, **layers)

        def reread() -> WeftConfig:
            return source.load().config

        run_service(run(loaded, folder, listen, announce, name=runner, make_http_api=http_api, reread=reread))


@app.command("central")
def serve_central(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    listen: ListenOption = None,
    registry: RegistryOption = None,
    metrics: MetricsOption = None,
) -> None:
    """Run the runner of central models: those that `weft models create` declares.

    `weft up` runs it when it is needed. Of several, one serves and the others are standbys.

    Example: weft serve central --registry 127.0.0.1:7070
    """
    given, name = {"registry": registry}, "runner-central-models"
    with _service(name, home, config, given, _metrics_at(metrics), service="central") as (loaded, folder, announce):
        with large_imports():
            from weft_app.compose.provider_models import serve_central as run  # noqa: PLC0415 - see the module docstring

        run_service(run(loaded, folder, listen, announce))


def _http_api(
    config: WeftConfig, home: WeftHome, environment: RunnerEnvironment, runner: str | None, http_port: int | None
) -> "MakeHttpApi | None":
    """Returns a builder of the runner's HTTP API; None if it has none."""
    from weft_app.compose.demo import configured_runners  # noqa: PLC0415 - see the module docstring
    from weft_app.compose.edge_certificate import with_edge_certificate  # noqa: PLC0415
    from weft_app.compose.runner import pick_runner  # noqa: PLC0415
    from weft_app.compose.serving import registry_address  # noqa: PLC0415

    section = pick_runner(configured_runners(config), runner)
    port = section.http_port if http_port is None else http_port
    if port is None:
        return None
    from weft_app.compose.runner_http import RunnerHttp  # noqa: PLC0415

    return partial(
        RunnerHttp,
        config=with_edge_certificate(config, home),
        environment=environment,
        section=section,
        registry_address=registry_address(config, home),
        port=port,
    )


def _metrics_at(listen: str | None) -> dict[str, Any]:
    """Returns the settings that `--metrics` overrides."""
    return {} if listen is None else {"metrics": {"listen": listen or None}}


@contextmanager
def _service(
    name: str,
    home: Path,
    config: Path | None,
    addresses: Mapping[str, str | None],
    overrides: Mapping[str, Any],
    *,
    service: str = "",
    form: LogFormat | None = None,
    **layers: Any,
) -> Iterator[tuple[WeftConfig, WeftHome, Announce]]:
    """Yields configuration, home, and a function that announces the addresses of a service, which runs in the block.

    Until the block ends, files of the home have the first address of `name`, and the configured addresses of registry
    and router. `service` is the name on the terminal and defaults to `name`.
    """
    with serving(), ExitStack() as stack:
        read = _source(config, addresses, overrides, **layers).load()
        loaded = read.config
        folder = WeftHome(home.expanduser().absolute())
        folder.create()
        leave_deleted_folder(folder.root)
        # Logs to a terminal, or to a file under the home, where users expect it.
        log_file = None if is_err_terminal() else folder.log_file(name, loaded.log.max_file_bytes)
        configure_logging(name, level=loaded.log.level, file=log_file, form=form)
        for message in read.removed:
            log.warning("part of the configuration is ignored", why=message)
        file, announced = folder.address_file(name), list[str]()

        def announce(address: str) -> None:
            if not announced:
                keep_address(file, address)
            announced.append(address)
            say(f"{service or name} serves at {address}\n")

        targets = {"registry": loaded.addresses.registry, "router": loaded.addresses.router}

        def withdraw() -> None:
            # The files may be of another process of this name, because of which this one did not start.
            if announced and kept_address(file) == announced[0]:
                keep_address(file, None)
            if not kept_address(file):
                for target in targets:
                    keep_address(folder.target_file(name, target), None)

        stack.callback(withdraw)
        # Written first: the service may wait for its database, and commands must find the registry meanwhile.
        for target, address in targets.items():
            keep_address(folder.target_file(name, target), address)
        yield loaded, folder, announce


def _source(
    config: Path | None, addresses: Mapping[str, str | None], overrides: Mapping[str, Any] | None = None, **layers: Any
) -> ConfigurationSource:
    given = {name: address for name, address in addresses.items() if address is not None}
    return ConfigurationSource(path=config, overrides={**(overrides or {}), "addresses": given}, **layers)
