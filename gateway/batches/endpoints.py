"""/v1/batches: many requests in a file, and their answers in another."""

from fastapi import FastAPI, Request, Response

from gateway.answers.sse import encode_json
from gateway.answers.unary import JsonAnswer, UnaryAnswer, json_response
from gateway.batches.documents import BatchList, BatchObject, BatchRequest, batch_json, batch_status, list_json
from gateway.batches.parts import BatchParts
from gateway.batches.pieces import in_time
from gateway.intake.body import read_json_body
from gateway.intake.headers import tenant_of
from gateway.intake.json_guard import parse
from gateway.intake.query import Query
from gateway.openapi import answers, json_body
from gateway.parts import InferenceParts
from gateway.request_facts import facts_of
from gateway.responses.schema import MAX_ID_CHARS
from weft.kernel.errors import invalid_field
from weft.kernel.names import require_token

MAX_LISTED = 100
DEFAULT_LISTED = 20
_SURFACE = "batches"
_PATH = "/v1/batches/{batch_id}"
_LIST = ("limit", "after")
_AT_THEIR_END = frozenset({"failed", "completed", "expired"})


def add_batches(app: FastAPI, parts: InferenceParts, batches: BatchParts) -> None:
    """Add the routes. A tenant sees its own batches."""
    routes = _Routes(parts, batches)
    for path, method, endpoint, extra in (
        ("/v1/batches", "POST", routes.create_batch, json_body(BatchRequest) | answers(BatchObject)),
        ("/v1/batches", "GET", routes.list_batches, answers(BatchList, query=_LIST)),
        (_PATH, "GET", routes.get_batch, answers(BatchObject, path="batch_id")),
        (f"{_PATH}/cancel", "POST", routes.cancel_batch, answers(BatchObject, path="batch_id")),
    ):
        app.add_api_route(path, endpoint, methods=[method], tags=["openai"], openapi_extra=extra)


class _Routes:
    """What is done at each of them."""

    def __init__(self, parts: InferenceParts, batches: BatchParts) -> None:
        self._parts = parts
        self._batches = batches
        self._timeout = parts.config.batches.store_timeout_seconds

    async def create_batch(self, request: Request) -> Response:
        """Have every request of a file done, within a window."""
        facts_of(request.scope).surface = _SURFACE
        config, scope = self._parts.config, request.scope
        raw = await read_json_body(scope, request.receive, config)
        asked = parse(BatchRequest, raw, max_depth=config.limits.max_json_depth)
        require_token(asked.input_file_id, "input_file_id", MAX_ID_CHARS)
        tenant = tenant_of(scope)
        if self._parts.rate_limits is not None:
            self._parts.rate_limits.take(tenant)

        async def produce() -> JsonAnswer:
            with self._batches.creations.one():
                batch = await self._batches.maker.make(scope, tenant, asked)
            return JsonAnswer(encode_json(batch_json(batch)), [])

        return UnaryAnswer(produce, cut_off_seconds=config.request_timeout_seconds + config.deadline_slack_seconds)

    async def list_batches(self, request: Request) -> Response:
        """Batches, the newest first."""
        facts_of(request.scope).surface = _SURFACE
        query = Query(request.scope, frozenset(_LIST))
        limit = query.count("limit", MAX_LISTED) or DEFAULT_LISTED
        after = require_token(query.text("after"), "after", MAX_ID_CHARS) if "after" in query else ""
        tenant = tenant_of(request.scope)
        page = await in_time(self._batches.port.list_page(tenant, after=after, limit=limit), self._timeout)
        for batch in page.batches:
            self._batches.finisher.begin(batch)
        return json_response(list_json([batch_json(batch) for batch in page.batches], has_more=page.has_more))

    async def get_batch(self, request: Request) -> Response:
        """A batch as it is."""
        tenant, batch_id = _asked(request)
        batch = await in_time(self._batches.port.get(tenant, batch_id), self._timeout)
        settled = await self._batches.finisher.settle(batch)
        return json_response(batch_json(settled.batch, settled.problem))

    async def cancel_batch(self, request: Request) -> Response:
        """End every request of a batch that has not come to its end; the answers that there are stay."""
        tenant, batch_id = _asked(request)
        batch = await in_time(self._batches.port.cancel(tenant, batch_id), self._timeout)
        status = batch_status(batch)
        if status in _AT_THEIR_END:
            raise invalid_field("batch_id", f"batch {batch_id} is {status} and cannot be cancelled")
        self._batches.finisher.begin(batch)
        return json_response(batch_json(batch))


def _asked(request: Request) -> tuple[str, str]:
    facts_of(request.scope).surface = _SURFACE
    batch_id = require_token(request.path_params["batch_id"], "batch_id", MAX_ID_CHARS)
    return tenant_of(request.scope), batch_id
