"""The program: `python -m weft_testing.fake_backend --port 0 --alias tiny --parallel 4 [switches]`."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

# It verifies no certificates, but importing aiohttp would read the trust store: a sixth of the start time.
os.environ["SSL_CERT_FILE"] = os.environ["SSL_CERT_DIR"] = os.devnull

from aiohttp import web

from weft_testing.fake_backend.arguments import ServerSettings, parse_command_line
from weft_testing.fake_backend.behaviour import Behaviour, Control
from weft_testing.fake_backend.process_faults import ProcessFaults, crash, die_with_parent, fail_to_fit
from weft_testing.fake_backend.server import FakeServer
from weft_testing.fake_backend.vllm_routes import print_load

_TRACEBACK = """\
Traceback (most recent call last):
  File "/opt/engine/server.py", line 147, in main
    model = load(path)
RuntimeError: failed to load model"""


def main(arguments: Sequence[str]) -> None:
    """Runs until a signal."""
    settings, behaviour = parse_command_line(arguments)
    if settings.die_with_parent:
        die_with_parent()
    asyncio.run(serve(settings, behaviour))
    # Like a killed server, does not wait for clients with open streams.
    os._exit(0)


async def serve(settings: ServerSettings, behaviour: Behaviour) -> None:
    """Listens, reports the address on stdout, and serves until a signal."""
    control = Control(behaviour)
    faults = ProcessFaults(control)
    stop = asyncio.Event()
    faults.handle_signals(stop)
    faults.apply(behaviour)
    if behaviour.out_of_memory_at_start:
        fail_to_fit()
    if behaviour.crash_at_start:
        crash(signal.Signals[behaviour.crash_signal])
    if settings.take_device_memory:
        # Imported here, because it takes a tenth of the start time and most fakes have no cards.
        from weft_testing.fake_backend.process import take_device_memory  # noqa: PLC0415

        take_device_memory(settings.take_device_memory, settings.tensor_split, os.environ)
    if behaviour.exit_at_start is not None and not behaviour.load_seconds:
        _exit_at_start(behaviour.exit_at_start)
    runner = web.AppRunner(
        FakeServer(settings, control, faults).application(),
        handle_signals=False,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=0.0,
    )
    await runner.setup()
    await _listen(runner, settings)
    if behaviour.exit_at_start is not None:
        asyncio.get_running_loop().call_later(behaviour.load_seconds, _exit_at_start, behaviour.exit_at_start)
    await stop.wait()


async def _listen(runner: web.AppRunner, settings: ServerSettings) -> None:
    if settings.is_vllm:
        print_load(settings)
    if settings.uds:
        await web.UnixSite(runner, settings.uds, backlog=1024).start()
        return
    await web.TCPSite(runner, settings.host, settings.port, backlog=1024, reuse_port=settings.reuse_port).start()
    host, port = runner.addresses[0][:2]
    print(f"listening on http://{host}:{port}", flush=True)  # noqa: T201 - the report is the interface


def _exit_at_start(code: int) -> None:
    print(_TRACEBACK, file=sys.stderr, flush=True)  # noqa: T201
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
