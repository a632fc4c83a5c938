"""The registry's calls, to a real gRPC server that checks permits as a runner does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from gated_store import GatedStore
from kit.messages import changed
from kit.refusals import refused
from roster_harness import BareRegistry

from registry_svc.mesh.runner_calls import EvictionAnswer, EvictionRequest, RunnerCalls
from registry_svc.mesh.states import Session
from registry_svc.operations.policy.loads import PoolMember
from registry_svc.operations.targets import RunnerDirectory
from registry_svc.registry_config import RegistryConfig
from weft.api.common.v1 import priority_pb2
from weft.api.registry.v1.model_pb2 import MODEL_OPERATION_CHAT, ModelManifest
from weft.api.registry.v1.runner_pb2 import Capability, InstanceState, Runner
from weft.api.registry.v1.runner_session_service_pb2 import HeartbeatRequest, OpenSessionRequest
from weft.api.runner.v1 import load_pb2, permit_pb2, runner_service_pb2, runner_service_pb2_grpc
from weft.dispatch.tickets import Action, PermitGate
from weft.kernel.channels.rpc import ChannelPool, answering, new_server
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.address import RUNNER_KEY, relayed_address
from weft_testing.fake_clock import FakeClock

LIMIT_SECONDS = 20.0
pb = runner_service_pb2
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class PermitCheckingRunner(runner_service_pb2_grpc.RunnerServiceServicer):
    """A runner whose backends are words."""

    clock: FakeClock
    gate: PermitGate
    heard: list[str] = field(default_factory=list)
    relayed_to: list[str] = field(default_factory=list)
    flushes: list[pb.FlushCacheRequest] = field(default_factory=list)
    yields: list[pb.YieldMemoryRequest] = field(default_factory=list)
    failure: WeftError | None = None
    hangs: bool = False
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    loading: asyncio.Event = field(default_factory=asyncio.Event)

    async def Load(self, request: pb.LoadRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        async with answering(context):
            self.admit(request.permit, Action.LOAD, request.model, context)
            await context.write(pb.LoadResponse(progress=pb.LoadProgress(stage="loading")))
            self.loading.set()
            try:
                if self.hangs:
                    await asyncio.Event().wait()
            finally:
                self.stopped.set()
            if self.failure is not None:
                raise self.failure
            tokens = request.options.parameters["context_tokens"].integer
            await context.write(pb.LoadResponse(result=pb.LoadResult(memory_bytes=tokens)))

    async def Unload(self, request: pb.UnloadRequest, context: Context) -> pb.UnloadResponse:  # noqa: N802
        async with answering(context):
            self.admit(request.permit, Action.UNLOAD, request.model, context)
            return pb.UnloadResponse(memory_freed_bytes=9)

    async def FlushCache(  # noqa: N802
        self, request: pb.FlushCacheRequest, context: Context
    ) -> pb.FlushCacheResponse:
        async with answering(context):
            self.admit(request.permit, Action.FLUSH, request.model, context)
            self.flushes.append(request)
            return pb.FlushCacheResponse(entry_count=3)

    async def YieldMemory(  # noqa: N802
        self, request: pb.YieldMemoryRequest, context: Context
    ) -> pb.YieldMemoryResponse:
        async with answering(context):
            self.admit(request.permit, Action.YIELD, request.model, context)
            self.yields.append(request)
            return pb.YieldMemoryResponse()

    def admit(self, permit: permit_pb2.OperationPermit, action: Action, model: str, context: Context) -> None:
        self.relayed_to += [str(value) for key, value in context.invocation_metadata() or () if key == RUNNER_KEY]
        operation = self.gate.admit(permit, action, model=model, now=self.clock.utc_now().timestamp())
        self.heard.append(f"{action.name.lower()} {model} of {operation}")
        if self.failure is not None and action is not Action.LOAD:
            raise self.failure


@dataclass
class RunnerStage:
    """A registry that knows one runner, which answers."""

    registry: BareRegistry
    session: Session
    runner: PermitCheckingRunner
    server: grpc.aio.Server
    calls: RunnerCalls
    address: str

    async def load(self, model: str = "m1") -> list[pb.LoadResponse]:
        options = load_pb2.LoadOptions()
        options.parameters["context_tokens"].integer = 8192
        async with (
            asyncio.timeout(LIMIT_SECONDS),
            aclosing(self.calls.load("r1", model, options, operation_id="op-1")) as said,
        ):
            return [response async for response in said]

    async def yielded(self) -> EvictionAnswer:
        request = EvictionRequest(
            runner="r1", model="m1", lease_id="lease-1", priority=Priority.HIGH, wanted_by="m2 of r1"
        )
        async with asyncio.timeout(LIMIT_SECONDS):
            return await self.calls.evict(request)


def opening(address: str, incarnation: str = "life-1") -> OpenSessionRequest:
    def manifest(name: str, pool: str) -> ModelManifest:
        return ModelManifest(name=name, pool_name=pool, operations=[MODEL_OPERATION_CHAT])

    return OpenSessionRequest(
        request_id=f"open-{incarnation}",
        runner=Runner(name="r1", incarnation=incarnation, address=address, host="h", runtime="fake", version="1"),
        models=[manifest("m1", ""), manifest("m2", "p"), manifest("m3", "p")],
    )


@asynccontextmanager
async def a_stage(tmp_path: Path, *, relayed: bool = False) -> AsyncIterator[RunnerStage]:
    clock, store, channels = FakeClock(), GatedStore(), ChannelPool()
    config = RegistryConfig(database_url="sqlite://", restart_spread_seconds=0)
    registry = BareRegistry(store, clock, config)
    await registry.start()
    target = f"unix:{tmp_path}/runner.sock"
    address = relayed_address(target, "r1") if relayed else target
    session = await registry.roster.open_session(opening(address))
    gate = PermitGate(runner="r1", incarnation="life-1")
    gate.use_key(session.ticket_key)
    runner = PermitCheckingRunner(clock, gate)  # type: ignore[abstract]  # nobody calls the other methods
    server = new_server()
    runner_service_pb2_grpc.add_RunnerServiceServicer_to_server(runner, server)
    server.add_insecure_port(target)
    await server.start()
    calls = RunnerCalls(registry.core, channels)
    try:
        yield RunnerStage(registry, session, runner, server, calls, address)
    finally:
        await channels.close()
        await server.stop(grace=None)
        await registry.stop()
        await store.really_close()


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[RunnerStage]:
    async with a_stage(tmp_path) as stage:
        yield stage


async def test_load_call_has_its_options_and_a_permit_the_runner_accepts(stage: RunnerStage) -> None:
    progress, result = await stage.load()
    assert (progress.progress.stage, result.result.memory_bytes) == ("loading", 8192)
    assert stage.runner.heard == ["load m1 of op-1"]


async def test_runner_is_not_called_before_this_registry_is_the_owner(stage: RunnerStage) -> None:
    asked, owner, channels = asyncio.Event(), asyncio.Event(), ChannelPool()

    async def until_owner() -> None:
        asked.set()
        await owner.wait()

    calls = RunnerCalls(stage.registry.core, channels, until_owner)
    unload = asyncio.create_task(calls.unload("r1", "m1", operation_id="op-1"))
    async with asyncio.timeout(LIMIT_SECONDS):
        await asked.wait()
        assert stage.runner.heard == []
        owner.set()
        await unload
    assert stage.runner.heard == ["unload m1 of op-1"]
    await channels.close()


async def test_each_call_has_its_own_permit_kind(stage: RunnerStage) -> None:
    answer = await stage.calls.unload("r1", "m1", operation_id="op-1")
    assert answer.memory_freed_bytes == 9
    request = pb.FlushCacheRequest(scope=pb.FlushCacheRequest.SCOPE_TAG, tag="t", tenant="acme")
    assert (await stage.calls.flush_cache("r1", request, operation_id="op-2")).entry_count == 3
    assert await stage.yielded() is EvictionAnswer.GIVEN_UP
    assert stage.runner.heard == ["unload m1 of op-1", "flush  of op-2", "yield m1 of "]
    assert (stage.runner.flushes[0].tag, stage.runner.flushes[0].tenant) == ("t", "acme")
    assert not request.HasField("permit")
    asked = stage.runner.yields[0]
    assert (asked.lease_id, asked.priority, asked.wanted_by) == ("lease-1", priority_pb2.PRIORITY_HIGH, "m2 of r1")


async def test_runner_with_another_key_rejects_the_permit(stage: RunnerStage) -> None:
    stage.runner.gate.use_key(b"x" * 32)
    for call in (stage.load(), stage.calls.unload("r1", "m1", operation_id="op-1")):
        with refused(Reason.PERMIT_INVALID):
            await call


async def test_relay_call_names_its_target_runner(tmp_path: Path) -> None:
    async with a_stage(tmp_path, relayed=True) as stage:
        await stage.load()
        await stage.calls.unload("r1", "m1", operation_id="op-1")
        assert await stage.yielded() is EvictionAnswer.GIVEN_UP
        assert stage.runner.relayed_to == ["r1"] * 3


async def test_unknown_or_lost_runner_is_not_called(stage: RunnerStage) -> None:
    with refused(Reason.NO_RUNNER_AVAILABLE):
        await stage.calls.unload("r9", "m1", operation_id="op-1")
    await stage.registry.roster.close_session(stage.session.id, "life-1")
    with refused(Reason.NO_RUNNER_AVAILABLE):
        await stage.load()
    assert await stage.yielded() is EvictionAnswer.UNREACHABLE
    assert stage.runner.heard == []


async def test_runner_error_is_passed_through_unchanged(stage: RunnerStage) -> None:
    stage.runner.failure = WeftError(Reason.INSUFFICIENT_MEMORY, "m2 holds 9 GiB", metadata={"needed": "1"})
    for call in (stage.load(), stage.calls.unload("r1", "m1", operation_id="op-1")):
        with pytest.raises(WeftError) as failure:
            await call
        assert (failure.value.reason, failure.value.message) == (Reason.INSUFFICIENT_MEMORY, "m2 holds 9 GiB")
        assert failure.value.metadata == {"needed": "1"}


async def test_leaving_a_load_cancels_it_on_the_runner(stage: RunnerStage) -> None:
    stage.runner.hangs = True
    loading = asyncio.create_task(stage.load())
    await stage.runner.loading.wait()
    assert not stage.runner.stopped.is_set()
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    async with asyncio.timeout(LIMIT_SECONDS):
        await stage.runner.stopped.wait()


async def test_runner_that_stops_mid_load_is_reported_as_lost(stage: RunnerStage) -> None:
    stage.runner.hangs = True
    loading = asyncio.create_task(stage.load())
    await stage.runner.loading.wait()
    await stage.server.stop(grace=None)
    with refused(Reason.WORKER_LOST):
        await loading


async def test_unreachable_runner_is_reported_as_lost(stage: RunnerStage) -> None:
    await stage.server.stop(grace=None)
    with refused(Reason.WORKER_LOST):
        await stage.calls.unload("r1", "m1", operation_id="op-1")
    assert await stage.yielded() is EvictionAnswer.UNREACHABLE


@pytest.mark.parametrize("reason", [Reason.RESOURCE_IN_USE, Reason.UNSUPPORTED_OPERATION, Reason.LEASE_LOST])
async def test_runner_that_keeps_its_memory_is_reported_as_refusing(stage: RunnerStage, reason: Reason) -> None:
    stage.runner.failure = WeftError(reason, "no")
    assert await stage.yielded() is EvictionAnswer.REFUSED


async def test_directory_reflects_the_registry_state(stage: RunnerStage) -> None:
    directory = RunnerDirectory(stage.registry.core)
    assert (directory.runner_of("m1"), directory.runner_of("m9")) == ("r1", None)
    assert (directory.names_pool("p"), directory.names_pool("m1")) == (True, False)
    assert (directory.incarnation_of("r1"), directory.incarnation_of("r9")) == ("life-1", None)
    assert directory.active_runners() == ["r1"]
    asleep = PoolMember(model="m2", reachable=True, loaded=False)
    assert directory.pool("p") == (asleep, replace(asleep, model="m3"))
    assert directory.pool("m1") == (replace(asleep, model="m1"),)
    assert directory.pool("m2") == ()

    def instance(model: str, phase: "InstanceState.Phase.ValueType", used: int) -> InstanceState:
        return InstanceState(model=model, phase=phase, slots_total=4, slots_used=used)

    states = [instance("m2", InstanceState.PHASE_READY, 3), instance("m3", InstanceState.PHASE_HIBERNATING, 0)]
    beat = HeartbeatRequest(
        session_id=stage.session.id, incarnation="life-1", sequence=1, capability=Capability(instances=states)
    )
    await stage.registry.roster.heartbeat(beat)
    busy = PoolMember(model="m2", reachable=True, loaded=True, slots_used=3)
    assert directory.pool("p") == (busy, replace(asleep, model="m3"))
    await stage.registry.roster.close_session(stage.session.id, "life-1")
    assert directory.active_runners() == []
    assert [member.reachable for member in directory.pool("p")] == [False, False]


async def test_restarted_runner_is_called_as_its_new_incarnation(stage: RunnerStage) -> None:
    again = changed(opening(stage.address, "life-2"), session_id=stage.session.id)
    session = await stage.registry.roster.open_session(again)
    with refused(Reason.PERMIT_INVALID):
        await stage.load()
    gate = PermitGate(runner="r1", incarnation="life-2")
    gate.use_key(session.ticket_key)
    stage.runner.gate = gate
    assert len(await stage.load()) == 2
