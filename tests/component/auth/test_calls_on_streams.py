"""Each call on a shared stream needs the access of its method, as a separate call does. See `authorization.txt`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from test_authorization_table import OUTCOMES, RING, SCOPES, credentials_of, rpc_outcome

from weft.api.registry.v1 import registry_service_pb2
from weft.dispatch.operation_table import OPERATIONS
from weft.dispatch.remote_router import LIST_QUEUES, PLACE, REPORT_END
from weft.kernel.access.principal import KeyRing
from weft.kernel.access.rpc_auth import AuthInterceptor, access_of, caller
from weft.kernel.channels.rpc import RpcMethod, new_server, open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.link import carried_calls
from weft.link.carried_calls import CARRY, LIMITS, CarriedCalls
from weft.link.frames import Side, error_of
from weft.link.link import Link, LinkCall
from weft_testing.fake_clock import FakeClock

CARRIED = (PLACE, REPORT_END, *dict.fromkeys(spec.runner_rpc for spec in OPERATIONS.values()))
READ = RpcMethod(registry_service_pb2.DESCRIPTOR.services_by_name["RegistryService"].methods_by_name["ListResources"])
"""No stream carries this and LIST_QUEUES; they need less than a stream itself."""


async def _refuse(call: LinkCall) -> Any:
    raise AssertionError(call.start.method)


@asynccontextmanager
async def carrying(
    who: str, ring: Callable[[], KeyRing] = lambda: RING, address: str = "127.0.0.1:0"
) -> AsyncIterator[tuple[Link, list[str], "asyncio.Future[None]"]]:
    """A caller's stream to a server with keys, the names of those whose calls were served, and what runs the stream."""
    served: list[str] = []

    async def serve(_request: Any, _context: Any) -> None:
        served.append(caller().name)

    server = new_server((AuthInterceptor(ring, FakeClock()),))
    CarriedCalls(dict.fromkeys((*CARRIED, LIST_QUEUES), serve)).add_to_server(server)
    port = server.add_insecure_port(address)
    await server.start()
    async with open_channel(address.replace(":0", f":{port}")) as channel:
        opened: Any = channel.stream_stream(CARRY.path, CARRY.request.SerializeToString, CARRY.response.FromString)
        stream = opened(metadata=credentials_of(who))
        link = Link(Side.ROUTER, LIMITS, _refuse)
        running = asyncio.ensure_future(link.run(stream, CARRY.request))
        try:
            yield link, served, running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            stream.cancel()
    await server.stop(None)


async def outcome(link: Link, rpc: RpcMethod) -> str:
    call = link.call(rpc.path)
    await call.send(b"")
    while await call.read() is not None:
        pass
    assert call.status is not None
    return "ok" if call.status.code == 0 else error_of(call.status).reason.name


@pytest.mark.parametrize("who", ["service", "local"])
async def test_each_call_on_a_stream_is_admitted_as_the_separate_call(who: str, tmp_path: Any) -> None:
    address = f"unix:{tmp_path}/s" if who == "local" else "127.0.0.1:0"
    async with carrying(who, address=address) as (link, served, _):
        for rpc in (*CARRIED, LIST_QUEUES):
            assert (rpc.path, await outcome(link, rpc)) == (rpc.path, rpc_outcome(rpc.path, who))
        assert await outcome(link, READ) == "UNSUPPORTED_OPERATION"
    assert len(served) == len(CARRIED) + 1
    assert set(served) == ({"local"} if who == "local" else {"key:service00000"})


@pytest.mark.parametrize("who", ["none", "join", *(each for each in SCOPES if each != "service")])
async def test_stream_itself_is_for_the_mesh_alone(who: str) -> None:
    async with carrying(who) as (_, served, running):
        with pytest.raises(WeftError) as raised:
            await running
    assert OUTCOMES[raised.value.reason] == rpc_outcome(CARRY.path, who)
    assert served == []
    # Else a stream would refuse somebody whom a separate call admits.
    assert {access_of(rpc.path) for rpc in CARRIED} == {access_of(CARRY.path)}


async def test_key_revoked_during_a_stream_calls_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried_calls, "RECHECK_SECONDS", 0.0)
    rings = [RING]
    async with carrying("service", lambda: rings[0]) as (link, served, _):
        assert await outcome(link, PLACE) == "ok"
        rings[0] = KeyRing()
        assert await outcome(link, PLACE) == "UNAUTHENTICATED"
    assert len(served) == 1
