"""A registry as a process of its own, as `weft serve registry` starts it, and `weft` commands against it."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import yaml
from kit.home_gateway import home_gateway
from mesh_process import WEFT
from typer.testing import CliRunner, Result

from weft.api.registry.v1 import key_service_pb2_grpc
from weft.kernel.access.principal import KeyRing
from weft.kernel.channels.rpc import open_channel
from weft.kernel.time.clock import SystemClock
from weft_app.cli.main import app
from weft_app.compose.key_ring import KeyRingWatcher

if TYPE_CHECKING:
    from weft.api.registry.v1.key_service_pb2_grpc import KeyServiceAsyncStub

STOP_SECONDS = 30.0
READ_SECONDS = 30.0


@contextmanager
def serving_registry(home: Path, **registry: object) -> Iterator["subprocess.Popen[str]"]:
    """The process, once it serves at the socket of `home`. It is killed in the end if it runs still."""
    home.mkdir(exist_ok=True)
    config = home / "weft.yaml"
    config.write_text(yaml.safe_dump({"registry": registry}))
    with (home / "registry.err").open("a") as errors:
        process = subprocess.Popen(
            [*WEFT, "serve", "registry", "--home", str(home), "--config", str(config)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    try:
        assert "serves at" in process.stdout.readline(), (home / "registry.err").read_text()
        yield process
    finally:
        process.kill()
        process.wait(STOP_SECONDS)
        process.stdout.close()


def stop_in_order(process: "subprocess.Popen[str]") -> None:
    """As an operator does."""
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(STOP_SECONDS) == 0


def weft(home: Path, *arguments: str) -> Result:
    """A `weft` command to its end, with a gateway of the home."""
    with home_gateway(home, f"unix:{home}/run/registry.sock"):
        return CliRunner().invoke(app, arguments, env={"WEFT_HOME": str(home), "COLUMNS": "300"})


@asynccontextmanager
async def key_stub(home: Path) -> AsyncIterator["KeyServiceAsyncStub"]:
    async with open_channel(f"unix:{home}/run/registry.sock") as channel:
        yield cast("KeyServiceAsyncStub", key_service_pb2_grpc.KeyServiceStub(channel))


async def key_ring(home: Path) -> KeyRing:
    """What a service that comes up now knows of keys."""
    async with open_channel(f"unix:{home}/run/registry.sock") as channel:
        watcher = KeyRingWatcher(channel, SystemClock())
        await watcher.start()
        async with asyncio.timeout(READ_SECONDS):
            await watcher.wait_ready()
        await watcher.stop()
        return watcher.ring
