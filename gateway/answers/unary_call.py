"""What is answered in one piece and not generated token by token: how it is asked for, and cut off."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Scope

from gateway.answers.generation import cut_off_seconds
from gateway.answers.sse import receipt_facts
from gateway.answers.unary import JsonAnswer, UnaryAnswer
from gateway.parts import InferenceParts
from gateway.ports import Whole
from gateway.request_facts import facts_of
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.request_trace import RequestContext

ResultT = TypeVar("ResultT")
Begin = Callable[[], Whole[ResultT]]
ToBody = Callable[[ResultT, receipt_pb2.Receipt], bytes]


def answered(
    parts: InferenceParts,
    scope: Scope,
    context: RequestContext,
    begin: Begin[ResultT],
    to_body: ToBody[ResultT],
    media_type: bytes = b"application/json",
) -> Response:
    """The response to a request that `begin` has done and whose answer `to_body` writes."""
    return UnaryAnswer(
        _producer(parts, scope, begin, to_body, media_type), cut_off_seconds=cut_off_seconds(parts, context)
    )


def _producer(
    parts: InferenceParts, scope: Scope, begin: Begin[ResultT], to_body: ToBody[ResultT], media_type: bytes
) -> Callable[[], Awaitable[JsonAnswer]]:
    facts = facts_of(scope)

    async def produce() -> JsonAnswer:
        facts.was_dispatched = True
        call = begin()
        result = await call.result()
        receipt = call.receipt or receipt_pb2.Receipt()
        body = to_body(result, receipt)
        parts.metrics.tokens_used(facts, receipt.usage)
        return JsonAnswer(body, receipt_facts(receipt), media_type)

    return produce
