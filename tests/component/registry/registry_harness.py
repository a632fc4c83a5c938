"""A real registry on a real gRPC server over a Unix socket, on a fake clock."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from registry_svc.config import RegistryConfig
from registry_svc.service import RegistryService, build
from weft.api.registry.v1 import (
    model_pb2,
    registry_service_pb2,
    registry_service_pb2_grpc,
    runner_pb2,
    runner_session_service_pb2,
    runner_session_service_pb2_grpc,
)
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call, new_server, open_channel
from weft.kernel.service import Health
from weft.testing.fake_clock import FakeClock

if TYPE_CHECKING:
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub
    from weft.api.registry.v1.runner_session_service_pb2_grpc import RunnerSessionServiceAsyncStub

WatchResponse = registry_service_pb2.WatchResponse
ACTIVE = runner_pb2.Runner.STATUS_ACTIVE
INACTIVE = runner_pb2.Runner.STATUS_INACTIVE
MODEL_ACTIVE = model_pb2.Model.STATUS_ACTIVE
MODEL_INACTIVE = model_pb2.Model.STATUS_INACTIVE
READ_LIMIT_SECONDS = 20.0


@dataclass
class RunningRegistry:
    """A registry that answers, and the two stubs to ask it with."""

    service: RegistryService
    clock: FakeClock
    channel: grpc.aio.Channel
    registry: "RegistryServiceAsyncStub"
    sessions: "RunnerSessionServiceAsyncStub"

    async def advance(self, seconds: float) -> None:
        """Let time pass; the sweeper finishes each of its rounds."""
        await self.clock.advance(seconds, sleepers=1)

    async def runner(self, name: str) -> runner_pb2.Runner:
        return (await self.registry.GetRunner(registry_service_pb2.GetRunnerRequest(name=name))).runner

    async def model(self, name: str) -> model_pb2.Model:
        return (await self.registry.GetModel(registry_service_pb2.GetModelRequest(name=name))).model

    async def watch(self, *, include_ticket_keys: bool = False) -> "WatchReader":
        """A watch whose snapshot has been read."""
        request = registry_service_pb2.WatchRequest(include_ticket_keys=include_ticket_keys)
        reader = WatchReader(self.registry.Watch(request))
        reader.snapshot = await reader.read()
        return reader


class WatchReader:
    """One Watch call, read response by response."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.snapshot = WatchResponse()

    async def read(self) -> WatchResponse:
        async with asyncio.timeout(READ_LIMIT_SECONDS):
            response = await self.call.read()
        if response is grpc.aio.EOF:
            raise AssertionError(await self.call.code())
        return cast("WatchResponse", response)

    async def read_changes(self, count: int) -> list[str]:
        """The next `count` changes in words, such as "runner r1 active" or "model m1 gone"."""
        return [in_words((await self.read()).change) for _ in range(count)]


def in_words(change: registry_service_pb2.Change) -> str:
    match change.WhichOneof("kind"):
        case "runner":
            runner = change.runner.runner
            return f"runner {runner.name} {'active' if runner.status == ACTIVE else 'inactive'}"
        case "model":
            status = "active" if change.model.status == MODEL_ACTIVE else "inactive"
            return f"model {change.model.manifest.name} {status}"
        case "deleted_runner":
            return f"runner {change.deleted_runner} gone"
        case _:
            return f"model {change.deleted_model} gone"


@dataclass
class SomeRunner:
    """What a runner would send."""

    registry: RunningRegistry
    name: str = "r1"
    models: tuple[str, ...] = ("m1",)
    incarnation: str = "life-1"
    session_id: str = ""
    ticket_key: bytes = b""
    sequence: int = 0
    opens: int = field(default=0)

    def opening(self) -> runner_session_service_pb2.OpenSessionRequest:
        return runner_session_service_pb2.OpenSessionRequest(
            request_id=f"open-{self.name}-{self.incarnation}-{self.opens}",
            session_id=self.session_id,
            runner=runner_pb2.Runner(name=self.name, incarnation=self.incarnation, address=f"unix:/run/{self.name}"),
            models=[manifest(name) for name in self.models],
        )

    async def open(self) -> "SomeRunner":
        self.opens += 1
        response = await self.registry.sessions.OpenSession(self.opening())
        self.session_id, self.ticket_key = response.session_id, response.ticket_key
        return self

    async def beat(self, capability: runner_pb2.Capability | None = None) -> None:
        self.sequence += 1
        await self.registry.sessions.Heartbeat(
            runner_session_service_pb2.HeartbeatRequest(
                session_id=self.session_id,
                incarnation=self.incarnation,
                sequence=self.sequence,
                capability=capability,
            )
        )

    async def close(self) -> None:
        await self.registry.sessions.CloseSession(
            runner_session_service_pb2.CloseSessionRequest(session_id=self.session_id, incarnation=self.incarnation)
        )


def manifest(name: str) -> model_pb2.ModelManifest:
    return model_pb2.ModelManifest(name=name, operations=[model_pb2.MODEL_OPERATION_CHAT], context_tokens=4096)


def ready(model: str = "m1", *, slots_used: int = 0, detail: str = "") -> runner_pb2.Capability:
    state = runner_pb2.InstanceState(
        model=model,
        phase=runner_pb2.InstanceState.PHASE_READY,
        slots_total=4,
        slots_used=slots_used,
        detail=detail,
    )
    return runner_pb2.Capability(instances=[state])


@contextmanager
def refused(reason: Reason) -> Iterator[list[WeftError]]:
    """Expect the rpc inside to fail with `reason`; the list receives the error."""
    errors: list[WeftError] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield errors
    errors.append(error_from_call(caught.value, Reason.SERVICE_UNAVAILABLE))
    assert errors[0].reason is reason, errors[0]


@asynccontextmanager
async def running_registry(
    folder: Path, *, clock: FakeClock | None = None, **settings: float
) -> AsyncIterator[RunningRegistry]:
    """A registry on `folder`/registry.db, served on a Unix socket beside it, with health and reflection."""
    clock = clock or FakeClock()
    config = RegistryConfig(database_url=f"sqlite+aiosqlite:///{folder}/registry.db", **cast("Any", settings))
    service, server, health = build(config, clock=clock), new_server(), Health()
    service.register(server)
    health.register(server, service.service_names)
    address = f"unix:{folder}/registry.sock"
    server.add_insecure_port(address)
    await service.start()
    await server.start()
    await health.set_live()
    await health.set_serving(service.service_names, serving=True)
    async with open_channel(address) as channel:
        registry = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(channel))
        sessions = cast(
            "RunnerSessionServiceAsyncStub", runner_session_service_pb2_grpc.RunnerSessionServiceStub(channel)
        )
        try:
            yield RunningRegistry(service, clock, channel, registry, sessions)
        finally:
            await service.stop(grace_seconds=5.0)
            await server.stop(grace=None)
