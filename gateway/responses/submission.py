"""POST /v1/responses with `"background": true`: from a translated request to a task, and the answer to its caller."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Scope

from gateway.answers.event_stream import EventStream
from gateway.answers.unary import JsonAnswer, UnaryAnswer, cut_off_seconds
from gateway.deps import GatewayParts
from gateway.http.event_watches import EventWatches
from gateway.intake.headers import headers_of, idempotency_key_of
from gateway.media import RequestMedia, supply
from gateway.request_facts import facts_of
from gateway.responses.background import ORIGIN_KIND, BackgroundResponse, BackgroundResponses, StreamPosition
from gateway.responses.schema import ResponsesRequest
from weft.api.common.v1 import chat_pb2
from weft.dispatch.request_trace import RequestContext
from weft.durable.durable_call import task_spec
from weft.durable.tasks import NewTask
from weft.kernel.errors import invalid_field


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundParts:
    """What responses in the background need."""

    responses: BackgroundResponses
    watches: EventWatches
    """Streams of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A translated request that nobody has to wait for."""

    parts: GatewayParts
    background: BackgroundParts
    scope: Scope
    context: RequestContext
    payload: chat_pb2.ChatPayload
    media: RequestMedia
    """What of the payload is still to be fetched."""
    origin: bytes

    def whole(self) -> Response:
        """The response as it is once its task is durable."""

        async def produce() -> JsonAnswer:
            found = await self._submitted()
            return JsonAnswer(await self.background.responses.body(found), [])

        return UnaryAnswer(produce, cut_off_seconds=cut_off_seconds(self.parts, self.context))

    def streamed(self) -> Response:
        """Its events from the first on. A caller who leaves does not end it."""
        position = StreamPosition()

        async def events() -> AsyncGenerator[bytes]:
            found = await self._submitted()
            async with aclosing(self.background.responses.follow(found, position, is_new=True)) as followed:
                async for told in followed:
                    yield told

        return EventStream(self.parts, events(), watches=self.background.watches, failure=position.broken_off)

    async def _submitted(self) -> BackgroundResponse:
        await supply(self.payload, self.media, self.parts.media)
        key = idempotency_key_of(headers_of(self.scope))
        spec = task_spec(self.context, self.payload, origin=self.origin, origin_kind=ORIGIN_KIND)
        if key:
            # The same request comes with another trace each time.
            spec.traceparent = ""
        new = NewTask(tenant=self.context.tenant, spec=spec, idempotency_key=key, caller=self.context.caller)
        found = await self.background.responses.submit(new)
        facts_of(self.scope).task_id = found.task.id
        return found


def require_background(
    asked: ResponsesRequest, context: RequestContext, background: BackgroundParts | None
) -> BackgroundParts:
    """Raises INVALID_ARGUMENT naming the field where a request for the background cannot be had."""
    if background is None:
        raise invalid_field("background", "must be false: there are no responses in the background here")
    if asked.store is False:
        raise invalid_field("store", "must not be false with 'background': what nobody waits for has to be kept")
    if context.journal is not None:
        raise invalid_field("durable", "must not stand beside 'background', which is durable anyway")
    return background
