"""A mesh of a router, a runner and a gateway over two registries, whose owner is killed, frozen or stopped."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest
from apart_mesh import Apart, running_apart
from chats import DONE, streamed_chat
from kit.resources import records
from mesh_process import eventually, fake_runner, write_config
from registry_pair import Member, Pair, running_pair, until

from weft.api.operations.v1 import operation_pb2, operation_service_pb2, operation_service_pb2_grpc
from weft.api.registry.v1 import registry_service_pb2, registry_service_pb2_grpc, runner_pb2
from weft.kernel.channels.rpc import open_channel

if TYPE_CHECKING:
    from weft.api.operations.v1.operation_service_pb2_grpc import OperationServiceAsyncStub
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub

pytestmark = pytest.mark.nightly("kills and freezes registries of a pair")

pytest_plugins = ("database_fixtures",)

SILENCE_SECONDS = 3.0
LOAD_SECONDS = 6.0
WAIT_SECONDS = 60.0
SERVICES = ("router", "runner", "gateway")
State = operation_pb2.Operation
UNLOAD = operation_pb2.OperationAction(unload_model=operation_pb2.UnloadModel(model="m-a"))
LOAD = operation_pb2.OperationAction(load_model=operation_pb2.LoadModel(model="m-a"))
ENDED = {State.STATE_SUCCEEDED, State.STATE_FAILED, State.STATE_CANCELLED}


@pytest.fixture
def pair(tmp_path: Path, postgres_url: str) -> Iterator[Pair]:
    with running_pair(tmp_path, postgres_url, owner_silence_seconds=SILENCE_SECONDS) as pair:
        yield pair


@pytest.fixture
def mesh(tmp_path: Path, pair: Pair) -> Iterator[Apart]:
    addresses = {"registry": [each.address for each in pair.members]}
    runner = fake_runner("a", answer_tokens=0, tokens_per_second=10, load_seconds=LOAD_SECONDS)
    with running_apart(tmp_path, write_config(tmp_path, runner, addresses=addresses), SERVICES) as mesh:
        yield mesh


class Calls:
    """Calls over the list of both registries, as a client outside of the mesh makes them."""

    def __init__(self, addresses: str) -> None:
        self.channel = open_channel(addresses)
        self._registry = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(self.channel))
        self._operations = cast(
            "OperationServiceAsyncStub", operation_service_pb2_grpc.OperationServiceStub(self.channel)
        )

    async def runners(self) -> list[tuple[str, int]]:
        """Names and statuses; empty while no registry answers."""
        try:
            answer = await self._registry.ListResources(
                registry_service_pb2.ListResourcesRequest(kind="runner"), timeout=2.0
            )
        except Exception:  # noqa: BLE001 - the registry changes
            return []
        return [(each.name, each.status) for each in records(answer.resources)]

    async def has_runner(self) -> bool:
        """Whether the runner is there, and active."""
        return await self.runners() == [("a", runner_pb2.Runner.STATUS_ACTIVE)]

    async def expired(self) -> list[str]:
        """Events of runners that were missed, of this registry's life."""
        answer = await self._registry.ListEvents(registry_service_pb2.ListEventsRequest(), timeout=5.0)
        return [str(each) for each in answer.events if "no heartbeats" in each.message or "away for" in each.message]

    async def begin(self, action: operation_pb2.OperationAction, request_id: str) -> str:
        """Creates an operation and returns its name."""
        request = operation_service_pb2.CreateOperationRequest(
            request_id=request_id, action=action, requested_by="test"
        )
        return (await self._operations.CreateOperation(request, timeout=10.0)).operation.name

    async def operation(self, name: str) -> operation_pb2.Operation:
        """An operation as it is; empty while no registry answers."""
        request = operation_service_pb2.GetOperationRequest(name=name)
        try:
            return (await self._operations.GetOperation(request, timeout=2.0)).operation
        except Exception:  # noqa: BLE001 - as above
            return operation_pb2.Operation()


async def ready(http: aiohttp.ClientSession, mesh: Apart) -> None:
    async def healthy() -> bool:
        async with http.get(f"{mesh.url}/health") as response:
            return response.status == 200

    await eventually(healthy, WAIT_SECONDS, "the gateway does not become healthy")


def _lose(owner: Member, number: signal.Signals) -> None:
    """Kills or freezes the owner; a killed one is waited for."""
    owner.send(number)
    if number is signal.SIGKILL:
        owner.wait()


def _comes_back(member: Member, number: signal.Signals) -> None:
    """Has a lost owner come back; one that was frozen finds that another one owns the database, and ends."""
    if number is signal.SIGSTOP:
        member.send(signal.SIGCONT)
        assert member.wait() == 1
    member.start()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_losing_the_owner_loses_no_stream_runner_or_operation(
    mesh: Apart, pair: Pair, number: signal.Signals
) -> None:
    first, second = pair.members
    async with aiohttp.ClientSession() as http:
        await ready(http, mesh)
        calls = Calls(pair.addresses)
        await eventually(calls.has_runner, WAIT_SECONDS, "no runner")
        started = asyncio.Event()
        stream = asyncio.create_task(streamed_chat(mesh.url, begun=started, max_tokens=60))
        await asyncio.wait_for(started.wait(), WAIT_SECONDS)
        _lose(first, number)
        until(lambda: second.serves)
        # The runner comes back to the new owner by itself; nothing of it had to expire.
        await eventually(calls.has_runner, WAIT_SECONDS, "the runner does not come back")
        events = await stream
        assert (events[-1], len(events) > 60) == (DONE, True)
        assert (await streamed_chat(mesh.url, max_tokens=5))[-1] == DONE
        assert await calls.expired() == []
        # An operation that the owner has begun is ended by the next one.
        _comes_back(first, number)
        until(lambda: "a standby waits" in second.said())
        await unloaded(calls, "unload-1")
        name = await calls.begin(LOAD, "load-1")
        await eventually(lambda: _state(calls, name, {State.STATE_RUNNING}), WAIT_SECONDS, "the load does not begin")
        _lose(second, number)
        until(lambda: first.serves)
        await eventually(lambda: _state(calls, name, ENDED), WAIT_SECONDS, "the load does not end")
        _comes_back(second, number)
        assert (await calls.operation(name)).state == State.STATE_SUCCEEDED
        assert await calls.expired() == []
        assert (await streamed_chat(mesh.url, max_tokens=5))[-1] == DONE
        await calls.channel.close()


async def unloaded(calls: Calls, request_id: str) -> None:
    """Has the model unloaded."""
    name = await calls.begin(UNLOAD, request_id)
    await eventually(lambda: _state(calls, name, ENDED), WAIT_SECONDS, "the unload does not end")


async def _state(calls: Calls, name: str, states: set[Any]) -> bool:
    return (await calls.operation(name)).state in states
