"""Server programs whose command has another process listen, as `docker run` does."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from kit.engines import events_of
from kit.failures import fails
from server_dialects import TOLD, fake_command, server_settings

from runner_svc.backend.engine_process import EnginePorts, PortRange
from runner_svc.policy.timeouts import StopGraces
from runner_svc.runtimes.server.server_backend import ServerBackend
from runner_svc.runtimes.started_server import MAX_FOREIGN_LISTENERS
from weft.kernel.errors.reasons import Reason
from weft_testing.free_port import free_ports

pytestmark = pytest.mark.slow("starts engine processes")

CLIENT = str(Path(__file__).with_name("container_client.py"))
GRACES = StopGraces(first_term_seconds=10.0)


class ContainerDaemon:
    """Starts the commands of clients as children of its own process, which is none of weft's engines."""

    def __init__(self) -> None:
        self.containers: list[Process] = []

    @property
    def running_count(self) -> int:
        return sum(container.returncode is None for container in self.containers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        command = json.loads(await reader.readline())
        container = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
        )
        self.containers.append(container)
        terminating = asyncio.create_task(self._pass_on(reader, container))
        await container.wait()
        writer.close()
        await terminating

    async def _pass_on(self, reader: asyncio.StreamReader, container: Process) -> None:
        while await reader.readline():
            with suppress(ProcessLookupError):
                container.send_signal(signal.SIGTERM)

    async def end(self) -> None:
        for container in self.containers:
            with suppress(ProcessLookupError):
                container.kill()
            await container.wait()


@asynccontextmanager
async def _daemon(folder: Path) -> AsyncGenerator[tuple[ContainerDaemon, tuple[str, ...]]]:
    """Yields the daemon, and the command of a client that has it start the fake."""
    daemon, address = ContainerDaemon(), str(folder / "daemon.sock")
    async with await asyncio.start_unix_server(daemon.serve, address):
        try:
            yield daemon, (sys.executable, CLIENT, address, *fake_command(*TOLD))
        finally:
            await daemon.end()


async def test_container_listens_on_its_port_and_stops_with_its_client(tmp_path: Path) -> None:
    async with _daemon(tmp_path) as (daemon, command):
        backend = ServerBackend(*server_settings(command=command, external_listener=True, graces=GRACES))
        try:
            async with asyncio.timeout(30.0):
                await backend.start()
            events = await events_of(backend)
            assert daemon.running_count == 1
            assert backend.signs() is None, "the processor time of the client is not that of the engine"
        finally:
            await backend.stop()
        assert daemon.running_count == 0, "the client ends after its container"
    assert events[-1].HasField("finished")


@pytest.mark.parametrize("port_count", [1, 8])
async def test_container_without_the_setting_is_rejected_and_error_names_it(tmp_path: Path, port_count: int) -> None:
    first = free_ports(port_count)
    ports = EnginePorts(PortRange(first=first, last=first + port_count - 1))
    async with _daemon(tmp_path) as (daemon, command):
        settings = server_settings(command=command, ports=ports, graces=GRACES)
        with fails(Reason.CONNECT_FAILED, "external_listener: true"):
            async with asyncio.timeout(60.0):
                await ServerBackend(*settings).start()
        assert len(daemon.containers) == min(port_count, MAX_FOREIGN_LISTENERS), "it is not started on every port"


async def test_container_does_not_start_if_its_port_is_in_use(tmp_path: Path) -> None:
    async with _daemon(tmp_path) as (daemon, command), await asyncio.start_server(_hang_up, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        ports = EnginePorts(PortRange(first=port, last=port))
        backend = ServerBackend(*server_settings(command=command, external_listener=True, ports=ports))
        with fails(Reason.CONNECT_FAILED, f"port_range {port}-{port}"):
            await backend.start()
        assert daemon.containers == []


async def _hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()
