"""ProcessService of a runner behind the relay: its health, its log level, and the entry of the audit log."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from relay_harness import RUNNER, Mesh, refusal, running_laptop, running_mesh_side, soon

from weft.api.operations.v1 import (
    operation_service_pb2,
    operation_service_pb2_grpc,
    process_service_pb2_grpc,
)
from weft.api.operations.v1 import process_service_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import answering


class Process(process_service_pb2_grpc.ProcessServiceServicer):
    """The process of a laptop."""

    def __init__(self) -> None:
        self.asked: list[pb.SetLogLevelRequest] = []
        self.refuses = False

    async def GetHealth(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetHealthResponse(status="ok", log_level="info")

    async def SetLogLevel(self, request: Any, context: Any) -> Any:  # noqa: N802
        async with answering(context):
            if self.refuses:
                raise WeftError(Reason.INVALID_ARGUMENT, "not so loud")
            self.asked.append(request)
            return pb.SetLogLevelResponse(level=request.level, previous_level="info")


class Audit(operation_service_pb2_grpc.OperationServiceServicer):
    """What is written into the audit log."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[operation_service_pb2.RecordLogLevelRequest] = asyncio.Queue()

    async def RecordLogLevel(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.written.put_nowait(request)
        return operation_service_pb2.RecordLogLevelResponse()


def an_audit() -> Audit:
    # The generated base class counts every method as abstract; those that are left out answer UNIMPLEMENTED.
    made: Audit = cast("Any", Audit)()
    return made


@asynccontextmanager
async def laptop_with(process: Process, audit: Audit, folder: Path) -> AsyncIterator[tuple[Mesh, Any]]:
    def keep_audit(server: grpc.aio.Server) -> None:
        operation_service_pb2_grpc.add_OperationServiceServicer_to_server(audit, server)

    def be_a_process(server: grpc.aio.Server) -> None:
        process_service_pb2_grpc.add_ProcessServiceServicer_to_server(process, server)

    async with (
        running_mesh_side(folder, add_to_registry=keep_audit) as mesh,
        running_laptop(mesh, add_to_runner=be_a_process) as laptop,
    ):
        await laptop.open()
        stub: Any = process_service_pb2_grpc.ProcessServiceStub
        yield mesh, stub(mesh.channel)


async def test_relayed_runner_reports_its_own_health(tmp_path: Path) -> None:
    async with laptop_with(Process(), an_audit(), tmp_path) as (mesh, processes):
        found = await soon(processes.GetHealth(pb.GetHealthRequest(), metadata=mesh.metadata))
        assert (found.status, found.log_level) == ("ok", "info")


async def test_process_call_without_a_runner_name_is_not_relayed(tmp_path: Path) -> None:
    async with laptop_with(Process(), an_audit(), tmp_path) as (_, processes):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await soon(processes.GetHealth(pb.GetHealthRequest()))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED, "this router has no such service itself"


async def test_changed_log_level_is_audited_with_the_caller(tmp_path: Path) -> None:
    process, audit = Process(), an_audit()
    async with laptop_with(process, audit, tmp_path) as (mesh, processes):
        request = pb.SetLogLevelRequest(level="debug", requested_by="key:ann")
        assert (await soon(processes.SetLogLevel(request, metadata=mesh.metadata))).level == "debug"
        entry = await soon(audit.written.get())
        assert (entry.process, entry.level, entry.changed_by) == (f"runner/{RUNNER}", "debug", "key:ann")
        assert entry.HasField("end_time")
        await soon(processes.SetLogLevel(pb.SetLogLevelRequest(), metadata=mesh.metadata))
        entry = await soon(audit.written.get())
        assert (entry.level, entry.changed_by, entry.HasField("end_time")) == ("configured", "local", False)
    assert [each.requested_by for each in process.asked] == ["key:ann", "local"]


async def test_log_level_change_the_runner_rejects_is_not_audited(tmp_path: Path) -> None:
    process, audit = Process(), an_audit()
    process.refuses = True
    async with laptop_with(process, audit, tmp_path) as (mesh, processes):
        loud = processes.SetLogLevel(pb.SetLogLevelRequest(level="loud"), metadata=mesh.metadata)
        assert (await refusal(loud)).reason is Reason.INVALID_ARGUMENT
        assert audit.written.empty()
