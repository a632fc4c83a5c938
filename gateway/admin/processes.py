"""`/v1/admin/process-health` and `/v1/admin/log-level`: the health of one process, and the level of its log."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import grpc
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from gateway.admin.operations import SURFACE, Admin
from gateway.admin.ports import ProcessesPort
from gateway.answers.unary import json_response
from gateway.intake.query import begin_read
from gateway.operations import read_body, requester
from weft.api.gateway.v1 import process_pb2
from weft.api.operations.v1 import process_service_pb2 as pb
from weft.api.operations.v1 import process_service_pb2_grpc
from weft.dispatch.fleet import FleetSource
from weft.documents.codec import document_of
from weft.documents.document_base import DocumentPart
from weft.kernel.address import metadata_of
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log_level import MAX_LOG_LEVEL_SECONDS
from weft.kernel.names import require_name
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, error_from_call

MESH = "mesh"
SERVICES = (MESH, "registry", "router", "gateway")
RUNNER_PREFIX = "runner/"
RESET = "reset"
PROCESS_PARAMETERS = ("process",)
MAX_PROCESS_CHARS = 256
CALL_TIMEOUT_SECONDS = 5.0


class LogLevelBody(DocumentPart):
    """Another level for the log of one process, for a time."""

    process: Annotated[str, Field(max_length=MAX_PROCESS_CHARS)] = MESH
    """`gateway`, `router`, `registry`, `runner/NAME`, or `mesh`: the process of `weft up`."""
    level: Literal["debug", "info", "warning", "error", "reset"]
    """The lowest level that it logs; `reset`: the configured one, immediately."""
    seconds: Annotated[int, Field(ge=1, le=int(MAX_LOG_LEVEL_SECONDS))] | None = None
    """For how long; then the configured level holds again. Absent: 10 min."""


class ProcessesClient(ProcessesPort):
    """The ProcessService of services, and of runners behind a relay or not."""

    def __init__(self, services: Mapping[str, grpc.aio.Channel], fleet: FleetSource, channels: ChannelPool) -> None:
        """`services`: a channel to the process of each of SERVICES."""
        self._services = services
        self._fleet = fleet
        self._channels = channels

    @override
    async def health(self, process: str) -> pb.GetHealthResponse:
        found: pb.GetHealthResponse = await self._call(process, "GetHealth", pb.GetHealthRequest())
        return found

    @override
    async def set_log_level(self, process: str, request: pb.SetLogLevelRequest) -> pb.SetLogLevelResponse:
        changed: pb.SetLogLevelResponse = await self._call(process, "SetLogLevel", request)
        return changed

    async def _call(self, process: str, method: str, request: Any) -> Any:
        channel, metadata = await self._reach(process)
        stub: Any = process_service_pb2_grpc.ProcessServiceStub
        try:
            return await getattr(stub(channel), method)(request, timeout=CALL_TIMEOUT_SECONDS, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
            if found.reason is Reason.UNSUPPORTED_OPERATION:
                raise WeftError(found.reason, f"{process} is of a release that cannot be asked this") from error
            raise found from error

    async def _reach(self, process: str) -> tuple[grpc.aio.Channel, tuple[tuple[str, str], ...]]:
        if not process.startswith(RUNNER_PREFIX):
            return self._services[process], ()
        name = process.removeprefix(RUNNER_PREFIX)
        runner = self._fleet.view.runners.get(name)
        if runner is None or not runner.active:
            raise WeftError(Reason.NO_RUNNER_AVAILABLE, f"the runner {name} is not there")
        return await self._channels.get(runner.address), metadata_of(runner.address)


async def get_process_health(deps: Admin, request: Request) -> Response:
    """Returns the health of one process with its components, and the level of its log."""
    query = begin_read(request, SURFACE, PROCESS_PARAMETERS)
    process = _process_of(query.text("process") or MESH)
    found = await deps.ports.processes.health(process)
    health = process_pb2.ProcessHealth(
        process=process,
        status=found.status,
        live=found.live,
        ready=found.ready,
        components=[
            process_pb2.ProcessComponent(
                name=each.name,
                state=each.state,
                reason=each.reason,
                message=each.message,
                since_time=each.since_time if each.HasField("since_time") else None,
            )
            for each in found.components
        ],
        log_level=found.log_level,
        version=found.version,
        log_level_end_time=found.log_level_end_time if found.HasField("log_level_end_time") else None,
    )
    return json_response(document_of(health))


async def put_log_level(deps: Admin, request: Request) -> Response:
    """Changes the lowest level that a process logs, for a time; the audit log has it."""
    body = await read_body(request, deps.gateway.config, LogLevelBody, SURFACE)
    process = _process_of(body.process)
    level = "" if body.level == RESET else body.level
    wanted = pb.SetLogLevelRequest(level=level, requested_by=requester(request, "http"))
    if level and body.seconds is not None:
        wanted.duration.FromSeconds(body.seconds)
    changed = await deps.ports.processes.set_log_level(process, wanted)
    answer = process_pb2.ProcessLogLevel(
        process=process,
        level=changed.level,
        previous_level=changed.previous_level,
        end_time=changed.end_time if changed.HasField("end_time") else None,
    )
    return json_response(document_of(answer))


def _process_of(name: str) -> str:
    """Returns the name of a process. Raises INVALID_ARGUMENT for another one."""
    if name.startswith(RUNNER_PREFIX):
        require_name(name.removeprefix(RUNNER_PREFIX), "process")
    elif name not in SERVICES:
        raise invalid_field("process", f"must be {', '.join(SERVICES)} or runner/NAME")
    return name
