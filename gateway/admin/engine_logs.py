"""`GET /v1/admin/models/{name}/logs`: the output of a model's engine, from its runner, behind a relay or not."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from gateway.admin.operations import SURFACE, Admin
from gateway.admin.ports import EngineLogSource
from gateway.answers.sse_writer import EventStream, encoded_records
from gateway.answers.unary import json_response
from gateway.intake.query import begin_read
from gateway.resources.handlers import known_name_of
from weft.api.gateway.v1.engine_log_pb2 import EngineLog
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.dispatch.fleet import FleetSource, FleetView, ModelView
from weft.documents.codec import document_of
from weft.kernel.address import metadata_of
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.names import require_name_of_model
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, calling
from weft.kernel.unknown_names import MODEL_OR_POOL, unknown_name

LOG_PARAMETERS = ("lines", "follow", "member")
DEFAULT_LINES = 200
MAX_LINES = 1_000
"""Most lines that a runner keeps of an engine."""
TIMEOUT_SECONDS = 5.0
"""Deadline of a runner's last lines; the lines that follow have none."""


class EngineLogClient(EngineLogSource):
    """The output of engines from their runners."""

    def __init__(self, fleet: FleetSource, channels: ChannelPool) -> None:
        self._fleet = fleet
        self._channels = channels

    @override
    async def lines(self, model: ModelView, line_count: int, *, follow: bool) -> AsyncGenerator[EngineLog]:
        runner = self._fleet.view.runners.get(model.runner)
        if runner is None or not runner.active:
            raise WeftError(Reason.NO_RUNNER_AVAILABLE, f"no runner serves {model.name} now")
        stub: Any = runner_service_pb2_grpc.RunnerServiceStub(await self._channels.get(runner.address))
        request = runner_service_pb2.TailLogsRequest(model=model.name, line_count=line_count, follow=follow)
        timeout_seconds = None if follow else TIMEOUT_SECONDS
        call = stub.TailLogs(request, metadata=metadata_of(runner.address), timeout=timeout_seconds)
        try:
            with calling(Reason.WORKER_LOST):
                async for batch in call:
                    yield EngineLog(
                        model=model.name, runner=runner.name, lines=batch.lines, lost_line_count=batch.lost_line_count
                    )
        finally:
            call.cancel()


async def get_engine_logs(deps: Admin, request: Request) -> Response:
    """Returns the last lines of an engine; with follow=1, server-sent events that continue with new ones."""
    query = begin_read(request, SURFACE, LOG_PARAMETERS)
    count = query.count("lines", MAX_LINES, least=0) if "lines" in query else DEFAULT_LINES
    model = _member(deps.gateway.fleet.view, known_name_of(request, deps.gateway), query.text("member"))
    found = deps.ports.engine_logs.lines(model, count, follow=query.flag("follow"))
    if query.flag("follow"):
        return EventStream(deps.gateway, encoded_records(found))
    log = EngineLog(model=model.name, runner=model.runner)
    async with aclosing(found) as batches:
        async for batch in batches:
            log.lines.extend(batch.lines)
            log.lost_line_count += batch.lost_line_count
    return json_response(document_of(log))


def _member(view: FleetView, name: str, member: str) -> ModelView:
    """Returns the model of a name; of a pool with several members the one that is named.

    Raises MODEL_NOT_FOUND, and INVALID_ARGUMENT where the member must be named.
    """
    members = {model.name: model for model in view.pool_members(name)}
    if not members:
        raise unknown_name(MODEL_OR_POOL, name)
    chosen = require_name_of_model(member, "member") if member else name
    if chosen in members:
        return members[chosen]
    if not member and len(members) == 1:
        return next(iter(members.values()))
    raise invalid_field("member", f"must be one of {', '.join(sorted(members))}")
