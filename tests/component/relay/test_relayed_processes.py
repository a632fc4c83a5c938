"""ProcessService of a runner behind the relay: its health."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from relay_harness import Mesh, running_laptop, running_mesh_side, soon

from weft.api.operations.v1 import process_service_pb2 as pb
from weft.api.operations.v1 import process_service_pb2_grpc


class Process(process_service_pb2_grpc.ProcessServiceServicer):
    """The process of a laptop."""

    async def GetHealth(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetHealthResponse(status="ok", log_level="info")


@asynccontextmanager
async def laptop_with(process: Process, folder: Path) -> AsyncIterator[tuple[Mesh, Any]]:
    def be_a_process(server: grpc.aio.Server) -> None:
        process_service_pb2_grpc.add_ProcessServiceServicer_to_server(process, server)

    async with (
        running_mesh_side(folder) as mesh,
        running_laptop(mesh, add_to_runner=be_a_process) as laptop,
    ):
        await laptop.open()
        stub: Any = process_service_pb2_grpc.ProcessServiceStub
        yield mesh, stub(mesh.channel)


async def test_relayed_runner_reports_its_own_health(tmp_path: Path) -> None:
    async with laptop_with(Process(), tmp_path) as (mesh, processes):
        found = await soon(processes.GetHealth(pb.GetHealthRequest(), metadata=mesh.metadata))
        assert (found.status, found.log_level) == ("ok", "info")


async def test_process_call_without_a_runner_name_is_not_relayed(tmp_path: Path) -> None:
    async with laptop_with(Process(), tmp_path) as (_, processes):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await soon(processes.GetHealth(pb.GetHealthRequest()))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED, "this router has no such service itself"
