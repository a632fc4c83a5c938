"""`weft up`: a whole mesh on this machine, until Ctrl-C."""

import sys
from pathlib import Path
from typing import Annotated, Any, Self

import typer
import uvloop
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from weft.cli.options import DEFAULT_HOME, ConfigOption, HomeOption, reporting
from weft.host.config import WeftConfig, load_config
from weft.host.home import WeftHome
from weft.host.signals import stop_requested, until
from weft.host.up import ShowProgress, Stage, UpHost
from weft.kernel.telemetry import BoundedLogFile, configure_logging


def up(
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    port: Annotated[
        int | None, typer.Option("--port", "-p", help="HTTP port; 0 takes a free one. Default 8080.")
    ] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Also offer gRPC on this loopback port.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Logs on the terminal, not in a file.")] = False,
) -> None:
    """Start a mesh on this machine and serve until Ctrl-C.

    Without a configuration it serves the demo model, SmolLM2-135M.

    Example: weft up --home /tmp/mesh --port 9000
    """
    with reporting():
        overrides: dict[str, Any] = {"port": port, "grpc_port": grpc_port}
        loaded = load_config(config, {name: value for name, value in overrides.items() if value is not None})
        folder = WeftHome(home.expanduser().absolute())
        folder.create()
        log_file = None if verbose else BoundedLogFile(folder.logs / "host.log", loaded.log.max_file_bytes)
        configure_logging("host", level=loaded.log.level, file=log_file)
        with folder.claim():
            uvloop.run(run_up(loaded, folder, config))


async def run_up(config: WeftConfig, home: WeftHome, config_path: Path | None) -> None:
    """Come up with progress, wait for a signal, go down."""
    stop = stop_requested()
    with StageDisplay() as display:
        host = UpHost(config, home, config_path, display.show)
        try:
            ready = await until(stop, host.start())
        except BaseException:
            display.failed()
            raise
    if ready:
        print_ready(host, home)
        await stop.wait()
    sys.stdout.write(f"\nstopping: finishing running requests (at most {config.drain_seconds:.0f} s)\n")
    stop.clear()
    await until(stop, host.stop())
    if stop.is_set():
        sys.stdout.write("stopping now\n")
    await host.stop()
    sys.stdout.write("stopped\n")


def print_ready(host: UpHost, home: WeftHome) -> None:
    """What somebody needs to start using the mesh."""
    model = host.models[0]
    sys.stdout.write(
        f"\n  weft is up\n\n"
        f"  base URL  {host.url}/v1\n"
        f"  gRPC      {host.grpc_address}\n"
        f"  logs      {home.logs}\n\n"
        f"  try it:\n\n"
        f"    curl {host.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'      -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Say hello"}}]}}\'\n\n'
        f"  stop with Ctrl-C\n"
    )
    sys.stdout.flush()


class StageDisplay:
    """Shows stages: spinners that turn into ticks on a terminal, one plain line each otherwise."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._stages: dict[str, Stage] = {}
        self._live = Live(console=self._console, refresh_per_second=10, transient=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.update(self._render())
            self._live.stop()

    @property
    def show(self) -> ShowProgress:
        """Where stages are told."""
        return self._show

    def _show(self, stage: Stage) -> None:
        self._stages[stage.name] = stage
        if self._console.is_terminal:
            self._live.update(self._render())
        else:
            sys.stdout.write(f"{'ok  ' if stage.done else '... '} {stage.name}: {stage.detail}\n")
            sys.stdout.flush()

    def failed(self) -> None:
        """Leave the display as it stands: what is not ticked did not succeed."""
        for stage in self._stages.values():
            if not stage.done and not self._console.is_terminal:
                sys.stdout.write(f"fail {stage.name}: {stage.detail}\n")

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for stage in self._stages.values():
            table.add_row("[green]✓[/green]" if stage.done else Spinner("dots"), f"{stage.name}: {stage.detail}")
        return table
