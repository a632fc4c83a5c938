"""A whole mesh in this process, from the first line of progress to the last line of the stop."""

import sys
from pathlib import Path

from weft.cli.stages import StageDisplay
from weft.host.config import WeftConfig
from weft.host.home import WeftHome
from weft.host.signals import stop_requested, until
from weft.host.up import UpHost


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
