"""Health follows ability, over real processes: one fault in each service, what it changes, and that it is over."""

import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast

import aiohttp
import pytest
from apart_mesh import ALL_SERVICES, Apart, running_apart
from chats import answers
from grpc.aio import AioRpcError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kit.quick_weft import within
from mesh_process import eventually, fake_runner, write_config

from weft.kernel.channels.rpc import open_channel
from weft_testing.free_port import free_port

SECONDS = 30.0
QUICK = within(
    {
        "weft.kernel.services.health:HealthLimits": {
            "worse_after_checks": 2,
            "worse_after_seconds": 0,
            "better_after_checks": 2,
            "better_after_seconds": 0.5,
        },
        "weft.sql.ownership": {"INTERVAL_SECONDS": 0.2},
        "weft.dispatch.fleet": {"MAX_VIEW_AGE_SECONDS": 0.5},
    }
)
REGISTRY = "weft.api.registry.v1.RegistryService"
PLACEMENT, TASKS = "weft.api.router.v1.PlacementService", "weft.api.router.v1.TaskService"
RUNNER = "weft.api.runner.v1.RunnerService"
SERVED = {"registry": REGISTRY, "router": PLACEMENT, "runner-a": RUNNER}


class Watched:
    """A mesh of four processes, and the HTTP API of its runner."""

    def __init__(self, mesh: Apart, runner_url: str) -> None:
        self.mesh = mesh
        self.urls = {"gateway": mesh.url, "runner": runner_url}

    def process_id(self, service: str) -> int:
        return self.mesh._processes[service].pid

    async def ask(self, service: str, path: str) -> tuple[int, dict[str, Any]]:
        async with aiohttp.ClientSession() as http, http.get(f"{self.urls[service]}{path}") as response:
            return response.status, await response.json()

    async def answers(self) -> None:
        """Asserts that a chat is answered."""
        assert await answers(self.mesh.url)

    async def component(self, service: str, name: str) -> tuple[str, str]:
        """State and reason of a component of a service with HTTP."""
        _, body = await self.ask(service, "/health")
        found = next(each for each in body["components"] if each["name"] == name)
        return found["state"], found["reason"]

    async def until(self, condition: Callable[[], Awaitable[bool]], otherwise: str) -> None:
        await eventually(condition, SECONDS, otherwise)

    async def until_component(self, service: str, name: str, state: str, reason: str = "") -> None:
        async def is_so() -> bool:
            return await self.component(service, name) == (state, reason)

        await self.until(is_so, f"{name} of the {service} is never {state}")

    async def until_well(self) -> None:
        async def is_well() -> bool:
            http = [await self.ask(service, "/readyz") for service in self.urls]
            grpc = [await self.status(socket, name) for socket, name in SERVED.items()]
            return http == [(200, {"status": "ok"})] * 2 and set(grpc) == {"SERVING"}

        await self.until(is_well, "the mesh is never well")

    async def status(self, socket: str, service: str) -> str:
        """The answer of a health check: a word of gRPC's."""
        async with open_channel(self.address(socket)) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=SECONDS)
            except AioRpcError as error:
                return error.code().name
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    @asynccontextmanager
    async def watch(self, socket: str, service: str) -> AsyncIterator[Callable[[], Awaitable[str]]]:
        """Yields what returns the next word of a stream of health changes."""
        async with open_channel(self.address(socket)) as channel:
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))

            async def following() -> str:
                answer = cast("health_pb2.HealthCheckResponse", await call.read())
                return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

            try:
                yield following
            finally:
                call.cancel()

    def address(self, socket: str) -> str:
        return f"unix:{self.mesh.home}/run/{socket}.sock"


@contextmanager
def unwritable(process_id: int) -> Iterator[None]:
    """The files of a process take no byte more, as on a full disk."""
    soft, hard = resource.prlimit(process_id, resource.RLIMIT_FSIZE)
    resource.prlimit(process_id, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(process_id, resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture(scope="module")
def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder, port = tmp_path_factory.mktemp("health"), free_port()
    runner = fake_runner("a") | {"http_port": port}
    config = write_config(folder, runner, registry={"report_interval_seconds": 0.2})
    with running_apart(folder, config, within=dict.fromkeys(ALL_SERVICES, QUICK)) as mesh:
        yield Watched(mesh, f"http://127.0.0.1:{port}")


@pytest.fixture
async def watched(shared_mesh: Watched) -> Watched:
    await shared_mesh.until_well()
    return shared_mesh


async def test_healthy_mesh_reports_ok_for_every_component(watched: Watched) -> None:
    """The negative control of the tests below: what they see is not so without their fault."""
    for service in watched.urls:
        _, body = await watched.ask(service, "/health")
        assert {each["state"] for each in body["components"]} == {"ok"}, body
        assert (body["live"], body["ready"]) == (True, True)
        assert await watched.ask(service, "/livez") == (200, {"status": "ok"})
    assert await watched.status("registry", "nobody") == "NOT_FOUND"
    assert await watched.status("registry", "liveness") == "SERVING", "weft mesh health --live asks for it"


async def test_registry_with_a_read_only_store_is_not_serving_until_writes_work(watched: Watched) -> None:
    async with watched.watch("registry", REGISTRY) as following:
        assert await following() == "SERVING"
        with unwritable(watched.process_id("registry")):
            assert await following() == "NOT_SERVING"
            assert await watched.status("registry", "readiness") == "NOT_SERVING"
            assert await watched.status("registry", "") == "SERVING", "the process itself is alive"
        assert await following() == "SERVING"


async def test_router_places_requests_even_if_it_cannot_journal(watched: Watched) -> None:
    async with watched.watch("router", TASKS) as following:
        assert await following() == "SERVING"
        with unwritable(watched.process_id("router")):
            assert await following() == "NOT_SERVING"
            assert await watched.status("router", PLACEMENT) == "SERVING"
            assert await watched.status("router", "readiness") == "SERVING"
            await watched.answers()
        assert await following() == "SERVING"


async def test_services_without_a_registry_are_degraded_and_serve(watched: Watched) -> None:
    watched.mesh.end("registry", signal.SIGKILL)
    try:
        await watched.until_component("gateway", "fleet_view", "degraded", "old_fleet_view")
        await watched.until_component("runner", "registry", "degraded", "no_registry")
        for service in watched.urls:
            assert await watched.ask(service, "/readyz") == (200, {"status": "degraded"})
        assert await watched.status("router", PLACEMENT) == "SERVING"
        await watched.answers()
    finally:
        watched.mesh.start("registry", within=QUICK)
    await watched.until_well()


async def test_router_that_never_reached_a_registry_is_not_serving(watched: Watched) -> None:
    watched.mesh.end("registry", signal.SIGKILL)
    watched.mesh.end("router", signal.SIGKILL)
    try:
        watched.mesh.start("router", within=QUICK)
        async with watched.watch("router", PLACEMENT) as following:
            assert await following() == "NOT_SERVING"
            assert await watched.status("router", "") == "SERVING"
            watched.mesh.start("registry", within=QUICK)
            assert await following() == "SERVING"
    finally:
        for service in ("registry", "router"):
            if service not in watched.mesh._processes:
                watched.mesh.start(service, within=QUICK)
    await watched.until_well()
