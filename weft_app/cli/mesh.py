"""Runs a whole mesh in this process: start-up progress, serving, shutdown."""

import asyncio
from pathlib import Path

from weft.kernel.service import stop_tasks
from weft_app.cli.options import note
from weft_app.cli.output import say
from weft_app.cli.stages import StageDisplay
from weft_app.compose.critical import CriticalTasks
from weft_app.compose.home import WeftHome
from weft_app.compose.signals import ignore_hangups, stop_requested, until
from weft_app.compose.up import UpHost
from weft_app.config.config import WeftConfig


async def run_up(config: WeftConfig, home: WeftHome, config_path: Path | None) -> None:
    """Starts with progress, serves until a signal, shuts down."""
    stop = stop_requested()
    host = UpHost(config, home, config_path, tell=note)
    with CriticalTasks(stop):
        with StageDisplay(total=host.stage_count) as display:
            ready = await until(stop, host.start(display.show))
        if ready:
            print_ready(host, home)
            await stop.wait()
        say(f"\nstopping: finishing running requests (at most {config.drain_seconds:.0f} s)\n")
        await _stop(host, stop)
        say("stopped\n")


async def _stop(host: UpHost, again: asyncio.Event) -> None:
    """Drains and stops everything; a second SIGINT or SIGTERM ends the draining."""
    ignore_hangups()
    again.clear()
    stopping, hurrying = asyncio.create_task(host.stop()), asyncio.create_task(again.wait())
    await asyncio.wait({stopping, hurrying}, return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if stopping.done():
        stopping.result()
        return
    say("stopping now\n")
    host.kill_runners()
    await stop_tasks([stopping])


def print_ready(host: UpHost, home: WeftHome) -> None:
    """Prints the addresses and commands with which a user starts."""
    model = host.models[0] if host.models else "<model>"
    keys = "  keys      callers need one: weft keys create\n" if host.asks_for_keys else ""
    shown = ' -H "Authorization: Bearer $WEFT_API_KEY"' if host.asks_for_keys else ""
    notice = f"\n  WARNING   {host.notice}\n" if host.notice else ""
    joins = f"  runners   join at {host.relay.url}; make a token: weft runner token create\n" if host.relay else ""
    say(
        f"\n  weft is up\n\n"
        f"  base URL  {host.url}/v1\n"
        f"  gRPC      {host.grpc_address}\n"
        f"{keys}{joins}"
        f"  logs      {home.logs}\n{notice}\n"
        f"  try it:\n\n"
        f"    curl {host.url}/v1/chat/completions -H 'Content-Type: application/json'{shown} \\\n"
        f'      -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Say hello"}}]}}\'\n\n'
        f"  stop with Ctrl-C\n"
    )
