"""`/v1/admin/process-health`: health and log level of one process."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.admin_operations import SURFACE, Admin
from gateway.admin.process_client import MESH, RUNNER_PREFIX, SERVICES
from gateway.answers.unary import json_response
from gateway.intake.query import begin_read
from weft.api.gateway.v1 import process_pb2
from weft.documents.codec import document_of
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.names import require_name

PROCESS_PARAMETERS = ("process",)


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
    )
    return json_response(document_of(health))


def _process_of(name: str) -> str:
    """Returns the name of a process. Raises INVALID_ARGUMENT for an unknown one."""
    if name.startswith(RUNNER_PREFIX):
        require_name(name.removeprefix(RUNNER_PREFIX), "process")
    elif name not in SERVICES:
        raise invalid_field("process", f"must be {', '.join(SERVICES)} or runner/NAME")
    return name
