"""The whole router in front of a sleeping host: a scripted registry, a real magic packet, a real grant."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from kit.recipes import packet_recipe, wake_plan
from kit.resources import carried
from kit.scheduling import placement_request
from kit.serving import served
from waker_harness import MODEL, NOTICE_SECONDS, RUNNER, grant_of, next_word

from router_svc.router_config import RouterConfig
from router_svc.router_service import RouterService, build
from weft.api.registry.v1 import model_pb2, registry_service_pb2, registry_service_pb2_grpc, runner_pb2
from weft.api.registry.v1.wake_pb2 import Wake
from weft.dispatch.placement import Placement

HARDWARE_ADDRESS = "02:00:00:00:00:01"
InstancePhase = runner_pb2.InstanceState.Phase


class ScriptedRegistry(registry_service_pb2_grpc.RegistryServiceServicer):
    """Sends one watcher one snapshot after another."""

    def __init__(self) -> None:
        self._snapshots: asyncio.Queue[registry_service_pb2.WatchResponse] = asyncio.Queue()
        self._revision = 0

    def tell(self, plan: Wake, *, incarnation: str, phase: "InstancePhase.ValueType | None") -> None:
        """The model is in this phase; None: its runner is gone and it sleeps."""
        self._revision += 1
        response = registry_service_pb2.WatchResponse(revision=self._revision)
        watched = response.snapshot.runners.add(ticket_key=b"k" * 32)
        watched.runner.name, watched.runner.incarnation, watched.runner.address = RUNNER, incarnation, "unix:/nowhere"
        model = model_pb2.Model(runner=RUNNER)
        model.manifest.name = MODEL
        model.manifest.operations.append(model_pb2.MODEL_OPERATION_CHAT)
        model.manifest.wake.CopyFrom(plan)
        if phase is None:
            watched.runner.status = runner_pb2.Runner.STATUS_INACTIVE
            model.status = model_pb2.Model.STATUS_HIBERNATING
        else:
            watched.runner.status = runner_pb2.Runner.STATUS_ACTIVE
            model.status = model_pb2.Model.STATUS_ACTIVE
            watched.runner.capability.instances.add(model=MODEL, phase=phase, slots_total=1)
        response.snapshot.resources.append(carried(model))
        self._snapshots.put_nowait(response)

    async def Watch(  # noqa: N802 - the name of the rpc
        self, _request: registry_service_pb2.WatchRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[registry_service_pb2.WatchResponse]:
        while True:
            yield await self._snapshots.get()


@asynccontextmanager
async def running_router(tmp_path: Path, registry: ScriptedRegistry) -> AsyncIterator[RouterService]:
    """A router that has the registry's first snapshot."""
    socket = tmp_path / "registry.sock"
    async with served(socket, (registry_service_pb2_grpc.add_RegistryServiceServicer_to_server, registry)):
        router = build(RouterConfig(registry_address=f"unix:{socket}"))
        await router.start()
        try:
            await until_it_knows_the_mesh(router)
            yield router
        finally:
            await router.stop(0.0)


async def until_it_knows_the_mesh(router: RouterService) -> None:
    for _ in range(2000):
        if router.view.revision:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the router heard nothing from the registry in 10 s")


@asynccontextmanager
async def asking(router: RouterService) -> AsyncIterator[Placement]:
    """A request that has heard that the model wakes."""
    request = placement_request("r", tenant="default", model=MODEL)
    async with router.placement.place(request) as place:
        assert (await next_word(place)).HasField("loading")
        yield place


async def test_sleeping_host_gets_a_magic_packet_and_serves_when_awake(tmp_path: Path) -> None:
    registry = ScriptedRegistry()  # type: ignore[abstract]  # nobody calls the other methods
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
        card.bind(("127.0.0.1", 0))
        card.setblocking(False)
        recipe = packet_recipe(mac_address=HARDWARE_ADDRESS, broadcast_address="127.0.0.1", port=card.getsockname()[1])
        wake = wake_plan(by_runner=False, by_mesh=recipe)
        registry.tell(wake, incarnation="first", phase=None)
        async with running_router(tmp_path, registry) as router, asking(router) as place:
            async with asyncio.timeout(NOTICE_SECONDS):
                packet = await asyncio.get_running_loop().sock_recv(card, 200)
            assert bytes.fromhex(HARDWARE_ADDRESS.replace(":", "")) * 16 in packet
            registry.tell(wake, incarnation="second", phase=runner_pb2.InstanceState.PHASE_LOADING)
            registry.tell(wake, incarnation="second", phase=runner_pb2.InstanceState.PHASE_READY)
            assert (await grant_of(place)).runner_incarnation == "second"
