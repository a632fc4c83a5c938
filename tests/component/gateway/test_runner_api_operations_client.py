"""Operations over real gRPC, with a scripted service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit.grpc_server import served
from kit.steps import done

from gateway.operation_client import OperationsClient, ended_operation
from gateway.runner_api.runner_operations import callers_field
from weft.api.operations.v1 import operation_pb2, operation_service_pb2_grpc
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.kernel.channels.rpc import answering, open_channel
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason

Operation = operation_pb2.Operation
PENDING = Operation(name="operations/op-1", state=Operation.STATE_PENDING)
DONE = Operation(name="operations/op-1", state=Operation.STATE_SUCCEEDED)


@dataclass
class ScriptedService(operation_service_pb2_grpc.OperationServiceServicer):
    failure: WeftError | None = None
    states: list[Operation | asyncio.Event | WeftError] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    watch_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def CreateOperation(self, request: Any, context: Any) -> pb.CreateOperationResponse:  # noqa: N802
        return pb.CreateOperationResponse(operation=await self._answer(request, context))

    async def GetOperation(self, request: Any, context: Any) -> pb.GetOperationResponse:  # noqa: N802
        return pb.GetOperationResponse(operation=await self._answer(request, context))

    async def CancelOperation(self, request: Any, context: Any) -> pb.CancelOperationResponse:  # noqa: N802
        return pb.CancelOperationResponse(operation=await self._answer(request, context))

    async def WatchOperation(self, request: Any, context: Any) -> AsyncIterator[pb.WatchOperationResponse]:  # noqa: N802
        try:
            async with answering(context):
                async for step in done(self.states):
                    yield pb.WatchOperationResponse(operation=step)
        finally:
            self.watch_ended.set()

    WatchOperations = ListOperations = ListAuditEntries = None  # type: ignore[assignment]  # not asked for
    RecordCancellation = GetGovernance = None  # type: ignore[assignment]

    async def _answer(self, request: Any, context: Any) -> Operation:
        self.asked.append(request)
        async with answering(context):
            if self.failure is not None:
                raise self.failure
        return PENDING


@asynccontextmanager
async def client_of(folder: Path, service: ScriptedService) -> AsyncIterator[OperationsClient]:
    add = partial(operation_service_pb2_grpc.add_OperationServiceServicer_to_server, service)
    async with served(add, address=f"unix:{folder / 'registry.sock'}") as channel:
        yield OperationsClient(channel, timeout_seconds=2.0, callers_field=callers_field)


async def test_calls_reach_the_registry_unchanged(tmp_path: Path) -> None:
    service = ScriptedService()
    async with client_of(tmp_path, service) as client:
        wanted = pb.CreateOperationRequest(request_id="r-1", authorization="eyJ")
        assert await client.create(wanted) == PENDING
        assert await client.get("operations/op-1") == PENDING
        assert await client.cancel("operations/op-1", "me") == PENDING
    created, asked, cancelled = service.asked
    assert created == wanted
    assert asked.name == "operations/op-1"
    assert (cancelled.name, cancelled.requested_by) == ("operations/op-1", "me")


@pytest.mark.parametrize("reason", [Reason.OPERATION_REFUSED, Reason.NOT_FOUND, Reason.TOO_MANY_RESOURCES])
async def test_registry_error_keeps_its_reason(tmp_path: Path, reason: Reason) -> None:
    async with client_of(tmp_path, ScriptedService(WeftError(reason, "so"))) as client:
        with pytest.raises(WeftError) as refused:
            await client.get("operations/op-1")
    assert refused.value.reason is reason


async def test_unreachable_registry_is_unavailable(tmp_path: Path) -> None:
    async with open_channel(f"unix:{tmp_path / 'nobody.sock'}") as channel:
        with pytest.raises(WeftError, match="the registry cannot be reached") as refused:
            await OperationsClient(channel, timeout_seconds=2.0).get("operations/op-1")
    assert refused.value.reason is Reason.SERVICE_UNAVAILABLE


async def test_wait_ends_with_the_operation(tmp_path: Path) -> None:
    running = Operation(name="operations/op-1", state=Operation.STATE_RUNNING)
    service = ScriptedService(states=[running, DONE, asyncio.Event()])
    async with client_of(tmp_path, service) as client:
        assert await ended_operation(client, PENDING, 5.0) == DONE
        await service.watch_ended.wait()


async def test_wait_for_an_ended_operation_makes_no_call(tmp_path: Path) -> None:
    service = ScriptedService()
    async with client_of(tmp_path, service) as client:
        assert await ended_operation(client, DONE, 5.0) == DONE
    assert not service.watch_ended.is_set()


async def test_wait_times_out_and_releases_the_watch(tmp_path: Path) -> None:
    running = Operation(name="operations/op-1", state=Operation.STATE_RUNNING)
    service = ScriptedService(states=[running, asyncio.Event()])
    async with client_of(tmp_path, service) as client:
        assert await ended_operation(client, PENDING, 0.2) == running
        await service.watch_ended.wait()


async def test_registry_lost_during_a_wait_returns_the_last_seen_state(tmp_path: Path) -> None:
    running = Operation(name="operations/op-1", state=Operation.STATE_RUNNING)
    service = ScriptedService(states=[running, WeftError(Reason.SHUTTING_DOWN, "stopping")])
    async with client_of(tmp_path, service) as client:
        assert await ended_operation(client, PENDING, 5.0) == running


async def test_registry_field_error_uses_the_body_field_name(tmp_path: Path) -> None:
    refusal = invalid_field("action.flush_cache.tenant", "must be a word")
    async with client_of(tmp_path, ScriptedService(refusal)) as client:
        with pytest.raises(FieldError, match="tenantId: must be a word") as refused:
            await client.create(pb.CreateOperationRequest())
    assert refused.value.field == "tenantId"


async def test_admin_errors_use_the_admin_body_field_names(tmp_path: Path) -> None:
    refusals: list[WeftError] = [
        invalid_field("action.load_model.evict_model", "must be another"),
        WeftError(Reason.NOT_FOUND, "no runner", metadata={"field": "action.flush_cache.runner"}),
        invalid_field("page_token", "must be one that an earlier page returned"),
    ]
    named = []
    for number, refusal in enumerate(refusals):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with (
            client_of(folder, ScriptedService(refusal)),
            open_channel(f"unix:{folder / 'registry.sock'}") as channel,
        ):
            with pytest.raises(WeftError) as refused:
                await OperationsClient(channel, timeout_seconds=2.0).get("operations/op-1")
        named.append(refused.value.metadata["field"])
    assert named == ["evictModel", "runner", "pageToken"]
