"""`/v1/admin/process-health` and `/v1/admin/log-level`: health and log level of one process."""

from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.operations import SURFACE, Admin
from gateway.admin.process_client import MESH, RUNNER_PREFIX, SERVICES
from gateway.answers.unary import json_response
from gateway.deps import Gateway
from gateway.intake.query import begin_read
from gateway.operations import read_body, requester
from weft.api.gateway.v1 import process_pb2
from weft.api.operations.v1 import process_service_pb2 as pb
from weft.documents.codec import document_of
from weft.documents.document_base import DocumentPart
from weft.kernel.errors import invalid_field
from weft.kernel.log_level import MAX_LOG_LEVEL_SECONDS
from weft.kernel.names import require_name

RESET = "reset"
PROCESS_PARAMETERS = ("process",)
MAX_PROCESS_CHARS = 256


class LogLevelBody(DocumentPart):
    """A temporary log level for one process."""

    process: Annotated[str, Field(max_length=MAX_PROCESS_CHARS)] = MESH
    """`gateway`, `router`, `registry`, `runner/NAME`, or `mesh`: the process of `weft up`."""
    level: Literal["debug", "info", "warning", "error", "reset"]
    """The new log level; `reset`: back to the configured one."""
    seconds: Annotated[int, Field(ge=1, le=int(MAX_LOG_LEVEL_SECONDS))] | None = None
    """Duration, after which the configured level applies again. Absent: 10 min."""


async def get_process_health(ports: Admin, request: Request) -> Response:
    """Returns the health of one process with its components, and its log level."""
    query = begin_read(request, SURFACE, PROCESS_PARAMETERS)
    process = _process_of(query.text("process") or MESH)
    found = await ports.processes.health(process)
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


async def put_log_level(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Changes the log level of a process temporarily. The change is recorded in the audit log."""
    body = await read_body(request, deps.config, LogLevelBody, SURFACE)
    process = _process_of(body.process)
    level = "" if body.level == RESET else body.level
    wanted = pb.SetLogLevelRequest(level=level, requested_by=requester(request, "http"))
    if level and body.seconds is not None:
        wanted.duration.FromSeconds(body.seconds)
    changed = await ports.processes.set_log_level(process, wanted)
    answer = process_pb2.ProcessLogLevel(
        process=process,
        level=changed.level,
        previous_level=changed.previous_level,
        end_time=changed.end_time if changed.HasField("end_time") else None,
    )
    return json_response(document_of(answer))


def _process_of(name: str) -> str:
    """Returns the name of a process. Raises INVALID_ARGUMENT for an unknown one."""
    if name.startswith(RUNNER_PREFIX):
        require_name(name.removeprefix(RUNNER_PREFIX), "process")
    elif name not in SERVICES:
        raise invalid_field("process", f"must be {', '.join(SERVICES)} or runner/NAME")
    return name
