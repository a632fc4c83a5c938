"""A server that must be told its port: the port is free, and what answers there is the server and no other program."""

import asyncio
from collections.abc import AsyncGenerator, Container
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from kit.engine_settings import engine_settings
from kit.failures import fails
from kit.own_children import own_children

from runner_svc.backend.engine_process import EnginePorts, PortRange
from runner_svc.backend.port import LoadOrder
from runner_svc.policy.timeouts import StopGraces
from runner_svc.runtimes.llama_server.runtime import PARAMETERS, LlamaServerModel
from runner_svc.runtimes.started_server import StartedServer
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_backend.process import fake_backend_command
from weft_testing.free_port import free_ports

GRACES = StopGraces(first_term_seconds=0.5, second_term_seconds=0.5)


class ToldServer(StartedServer[LlamaServerModel]):
    """The fake as a server that does not say where it listens, and whose health is where its list of models is."""

    engine_parameters = PARAMETERS
    key_variable = "LLAMA_API_KEY"
    needs_port = True
    health_path = "/v1/models"

    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        return ["--port", str(port), "--alias", self.model.name]


class ScriptedPorts(EnginePorts):
    """Names these ports as free, one after the other."""

    def __init__(self, *ports: int) -> None:
        super().__init__(PortRange(first=min(ports), last=max(ports)))
        self._left = list(ports)
        self.given_back: list[int] = []

    def take(self, avoid: Container[int] = ()) -> int:
        if not self._left:
            raise WeftError(Reason.CONNECT_FAILED, "no port is left")
        port = self._left.pop(0)
        assert port not in avoid
        return port

    def give_back(self, port: int) -> None:
        self.given_back.append(port)


@asynccontextmanager
async def _foreign_server() -> AsyncGenerator[int]:
    """Yields the port of another program, which must receive nothing."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read())
        writer.close()

    received: list[bytes] = []

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
    assert received
    assert not any(received)


def _backend(*arguments: str, **given: Any) -> ToldServer:
    switches = given.pop("switches", {})
    return ToldServer(
        *engine_settings(
            LlamaServerModel,
            command=tuple(fake_backend_command(*arguments, **switches)),
            path=Path(__file__),
            load_stall_seconds=10.0,
            graces=GRACES,
            **given,
        )
    )


def _listened(backend: ToldServer) -> set[int]:
    connections = psutil.Process(backend.process_id).net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


async def test_foreign_program_on_the_port_is_not_mistaken_for_the_server() -> None:
    children = own_children()
    async with _foreign_server() as foreign:
        free = free_ports(1)
        ports = ScriptedPorts(foreign, free)
        backend = _backend(ports=ports)
        async with asyncio.timeout(30.0):
            await backend.start()
        assert _listened(backend) == {free}
        assert ports.given_back == [foreign]
        await backend.stop()
    assert own_children() == children


async def test_server_does_not_start_if_every_port_is_foreign() -> None:
    children = own_children()
    async with _foreign_server() as one, _foreign_server() as two:
        backend = _backend(ports=ScriptedPorts(one, two))
        with fails(Reason.CONNECT_FAILED):
            async with asyncio.timeout(30.0):
                await backend.start()
    assert own_children() == children


async def test_server_that_dies_for_another_reason_is_not_retried_on_another_port() -> None:
    ports = ScriptedPorts(*range(first := free_ports(2), first + 2))
    backend = _backend(ports=ports, switches={"exit_at_start": 3})
    with fails(Reason.SERVER_DIED):
        await backend.start()
    assert len(ports.given_back) == 1
