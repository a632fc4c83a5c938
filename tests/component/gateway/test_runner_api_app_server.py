"""Faults of the server under every HTTP API, each with its regression test."""

import asyncio
import socket
from collections.abc import Callable

import pytest
from gateway_script import FixedFleet, ScriptedDispatcher
from runner_api_stage import ScriptedOperations, ScriptedQueue, ScriptedRunner, runner_api

from gateway.gateway_config import GatewayConfig
from gateway.runner_api.deps import RunnerApiConfig, RunnerApiPorts
from gateway.runner_api_service import build
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


async def test_tcp_nodelay_is_set_so_split_answers_are_not_delayed() -> None:
    """asyncio left Nagle's algorithm on, since the listener did not specify TCP: 44 ms for every answer."""
    async with runner_api() as stage:
        host, port = stage.service.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        server = stage.service._server._server
        assert server is not None
        async with asyncio.timeout(20):
            while not server.server_state.connections:  # noqa: ASYNC110 - uvicorn keeps a bare set
                await asyncio.sleep(0.001)
        (connection,) = server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        writer.close()
        await writer.wait_closed()


def at_port(port: int) -> RunnerApiConfig:
    return RunnerApiConfig(edge=GatewayConfig(port=port))


def metrics_at_port(port: int) -> RunnerApiConfig:
    return RunnerApiConfig(edge=GatewayConfig(port=0), metrics_port=port)


@pytest.mark.parametrize(("make", "option"), [(at_port, "--http-port"), (metrics_at_port, "METRICS_PORT")])
async def test_port_in_use_error_names_the_setting(make: Callable[[int], RunnerApiConfig], option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        service = build(
            make(port),
            RunnerApiPorts(
                runner=ScriptedRunner(),
                dispatcher=ScriptedDispatcher(),
                fleet=FixedFleet.of(),
                queue=ScriptedQueue(),
                operations=ScriptedOperations(),
            ),
        )
        with pytest.raises(
            WeftError, match=f"port {port} on 127.0.0.1 is taken by another program.*{option}"
        ) as caught:
            await service.start()
        await service.stop(grace_seconds=0)
    assert caught.value.reason is Reason.ALREADY_EXISTS
