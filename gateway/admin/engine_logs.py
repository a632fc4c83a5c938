"""`GET /v1/admin/models/{name}/logs`: the engine log of a model, from its runner, also behind a relay."""

from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.admin_operations import SURFACE, Admin
from gateway.answers.sse_writer import EventStream, encoded_records
from gateway.answers.unary import json_response
from gateway.deps import Gateway
from gateway.intake.query import begin_read
from gateway.resources.resource_handlers import known_name_of
from weft.api.gateway.v1.engine_log_pb2 import EngineLog
from weft.dispatch.fleet import FleetView, ModelView
from weft.documents.codec import document_of
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.names import require_name_of_model
from weft.kernel.values.unknown_names import MODEL_OR_POOL, unknown_name

LOG_PARAMETERS = ("lines", "follow", "member")
DEFAULT_LINES = 200
MAX_LINES = 1_000
"""Maximum lines that a runner keeps of an engine."""


async def get_engine_logs(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Returns the last lines of an engine; with follow=1, server-sent events that continue with new ones."""
    query = begin_read(request, SURFACE, LOG_PARAMETERS)
    count = query.count("lines", MAX_LINES, least=0) if "lines" in query else DEFAULT_LINES
    model = _member(deps.fleet.view, known_name_of(request, deps), query.text("member"))
    found = ports.engine_logs.lines(model, count, follow=query.flag("follow"))
    if query.flag("follow"):
        return EventStream(deps, encoded_records(found))
    log = EngineLog(model=model.name, runner=model.runner)
    async with aclosing(found) as batches:
        async for batch in batches:
            log.lines.extend(batch.lines)
            log.lost_line_count += batch.lost_line_count
    return json_response(document_of(log))


def _member(view: FleetView, name: str, member: str) -> ModelView:
    """Returns the model of a name; of a pool with several members, the requested one.

    Raises MODEL_NOT_FOUND, and INVALID_ARGUMENT if the member must be named.
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
