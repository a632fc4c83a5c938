"""Unary (non-streaming) responses; a disconnect or the deadline cancels the request."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answers.answer_builder import with_warnings
from gateway.answers.sse import receipt_facts
from gateway.deps import InferenceDeps
from gateway.errors import JSON, OLLAMA_JSON, rate_limit_headers
from gateway.http.disconnect import WhileConnected
from gateway.request_facts import facts_of
from weft.api.common.v1 import receipt_pb2, warning_pb2
from weft.dispatch.operation_table import ChunkT, OperationSpec, PayloadT
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.text.json_lines import encode_json
from weft.kernel.values.fast_dataclass import fast_dataclass


@fast_dataclass()
class JsonAnswer:
    """A complete body with its headers."""

    body: bytes
    headers: list[tuple[bytes, bytes]]
    media_type: bytes = JSON


class UnaryAnswer(Response):
    """Produces its answer when it is sent; cancels the producer on disconnect and at the deadline.

    Errors of the producer are raised before anything is sent, and become an HTTP status.
    """

    def __init__(self, produce: Callable[[], Awaitable[JsonAnswer]], *, cut_off_seconds: float) -> None:
        self.status_code = 200
        self.background: Any = None
        self._produce = produce
        self._cut_off_seconds = cut_off_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Produces and sends the answer."""
        with WhileConnected(scope, receive, cut_off_seconds=self._cut_off_seconds):
            answer = await self._produce()
        headers = [
            (b"content-type", answer.media_type),
            (b"content-length", str(len(answer.body)).encode()),
            *answer.headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})


def cut_off_seconds(deps: InferenceDeps, context: RequestContext) -> float:
    """Returns the seconds after which the gateway cancels a request that outlives its deadline."""
    timeout = deps.config.request_timeout_seconds if context.timeout_seconds is None else context.timeout_seconds
    # The dispatcher enforces no deadline for a durable task, so the caller's is enforced here, without slack.
    return timeout if context.journal is not None else timeout + deps.config.deadline_slack_seconds


def unary_answer(  # noqa: PLR0913 - of six, two have a default
    deps: InferenceDeps,
    scope: Scope,
    spec: OperationSpec[PayloadT, ChunkT],
    context: RequestContext,
    payload: PayloadT,
    to_body: Callable[[Any, receipt_pb2.Receipt], bytes | Awaitable[bytes]],
    media_type: bytes = JSON,
    *,
    warnings: Sequence[warning_pb2.Warning] = (),
) -> Response:
    """Returns the response of an operation. `to_body` encodes its result, or the whole answer of a streamed one.

    The warnings are added to a JSON object, and named in the headers of other answers.
    """
    facts = facts_of(scope)

    async def produce() -> JsonAnswer:
        facts.was_dispatched = True
        call = deps.dispatcher.call(spec, context, payload)
        result = await (call.result() if spec.whole is None else call.whole_result())
        receipt = call.receipt or receipt_pb2.Receipt()
        found = to_body(result, receipt)
        body = found if isinstance(found, bytes) else await found
        deps.metrics.tokens_used(facts, receipt.usage)
        headers = [*receipt_facts(receipt), *rate_limit_headers(call.rate_limits), *warning_headers(warnings)]
        return JsonAnswer(with_warnings(body, warnings) if media_type in _JSON_TYPES else body, headers, media_type)

    return UnaryAnswer(produce, cut_off_seconds=cut_off_seconds(deps, context))


def warning_headers(warnings: Sequence[warning_pb2.Warning]) -> list[tuple[bytes, bytes]]:
    """Returns the number of warnings and their fields as headers; none without warnings."""
    fields = ", ".join(quote(each.field, safe="[]()") for each in warnings)[:_MAX_HEADER_CHARS]
    counted = [(b"x-weft-warnings", b"%d" % len(warnings)), (b"x-weft-warning-fields", fields.encode())]
    return counted if warnings else []


_JSON_TYPES = frozenset({JSON, OLLAMA_JSON})
_MAX_HEADER_CHARS = 2_000


def json_response(
    body: object, status: int = 200, media_type: bytes = JSON, *, warnings: Sequence[warning_pb2.Warning] = ()
) -> Response:
    """Returns a complete JSON response, with warnings as the last member of an object."""
    content = with_warnings(encode_json(body), warnings)
    return Response(content, status_code=status, media_type=media_type.decode())


def list_json(entries: Sequence[dict[str, object]], *, has_more: bool) -> dict[str, object]:
    """Returns a page of a list in the format of OpenAI's API."""
    return {
        "object": "list",
        "data": entries,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
        "has_more": has_more,
    }


def list_after(entries: Sequence[dict[str, object]], after: str | None, limit: int, unknown: str) -> dict[str, object]:
    """Returns the page of a complete list after the entry with the id `after`; None: the first page.

    Raises INVALID_ARGUMENT naming `after`, with the message `unknown`, if the list has no such entry.
    """
    ids = [entry["id"] for entry in entries]
    if after is not None and after not in ids:
        raise invalid_field("after", unknown)
    start = 0 if after is None else ids.index(after) + 1
    return list_json(entries[start : start + limit], has_more=start + limit < len(entries))
