"""/v1/batches: create, list, get and cancel batches of requests."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import encode_json
from gateway.answers.unary import JsonAnswer, UnaryAnswer, json_response
from gateway.batches.chunks import in_time
from gateway.batches.deps import BatchDeps
from gateway.batches.documents import BatchRequest, batch_json, batch_status, list_json
from gateway.intake.body import read_json_body
from gateway.intake.headers import tenant_of
from gateway.intake.json_guard import parse
from gateway.intake.query import Query
from gateway.request_facts import facts_of
from gateway.responses.schema import MAX_ID_CHARS
from weft.kernel.errors import invalid_field
from weft.kernel.names import require_token

MAX_LISTED = 100
DEFAULT_LISTED = 20
_SURFACE = "batches"
_PATH = "/v1/batches/{batch_id}"
LIST_PARAMETERS = ("limit", "after")
_AT_THEIR_END = frozenset({"failed", "completed", "expired"})


async def create_batch(batches: BatchDeps, request: Request) -> Response:
    """Have every request of a file done, within a window."""
    facts_of(request.scope).surface = _SURFACE
    config, scope = batches.deps.config, request.scope
    raw = await read_json_body(scope, request.receive, config)
    params = parse(BatchRequest, raw, max_depth=config.limits.max_json_depth)
    require_token(params.input_file_id, "input_file_id", MAX_ID_CHARS)
    tenant = tenant_of(scope)
    if batches.deps.rate_limits is not None:
        batches.deps.rate_limits.take(tenant)

    async def produce() -> JsonAnswer:
        with batches.creations.slot():
            batch = await batches.maker.make(scope, tenant, params)
        return JsonAnswer(encode_json(batch_json(batch)), [])

    return UnaryAnswer(produce, cut_off_seconds=config.request_timeout_seconds + config.deadline_slack_seconds)


async def list_batches(batches: BatchDeps, request: Request) -> Response:
    """Batches, the newest first."""
    facts_of(request.scope).surface = _SURFACE
    query = Query(request.scope, frozenset(LIST_PARAMETERS))
    limit = query.count("limit", MAX_LISTED) or DEFAULT_LISTED
    after = require_token(query.text("after"), "after", MAX_ID_CHARS) if "after" in query else ""
    tenant = tenant_of(request.scope)
    page = await in_time(batches.port.list_page(tenant, after=after, limit=limit), batches.timeout_seconds)
    for batch in page.batches:
        batches.finisher.begin(batch)
    return json_response(list_json([batch_json(batch) for batch in page.batches], has_more=page.has_more))


async def get_batch(batches: BatchDeps, request: Request) -> Response:
    """A batch as it is."""
    tenant, batch_id = _tenant_and_id(request)
    batch = await in_time(batches.port.get(tenant, batch_id), batches.timeout_seconds)
    settled = await batches.finisher.settle(batch)
    return json_response(batch_json(settled.batch, settled.problem))


async def cancel_batch(batches: BatchDeps, request: Request) -> Response:
    """End every request of a batch that has not come to its end; the answers that there are stay."""
    tenant, batch_id = _tenant_and_id(request)
    batch = await in_time(batches.port.cancel(tenant, batch_id), batches.timeout_seconds)
    status = batch_status(batch)
    if status in _AT_THEIR_END:
        raise invalid_field("batch_id", f"batch {batch_id} is {status} and cannot be cancelled")
    batches.finisher.begin(batch)
    return json_response(batch_json(batch))


def _tenant_and_id(request: Request) -> tuple[str, str]:
    facts_of(request.scope).surface = _SURFACE
    batch_id = require_token(request.path_params["batch_id"], "batch_id", MAX_ID_CHARS)
    return tenant_of(request.scope), batch_id
