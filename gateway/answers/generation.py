"""Runs a translated generation request and answers it, streamed or unary."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial

from starlette.responses import Response
from starlette.types import Scope

from gateway.answers.answer_builder import AnswerBuilder
from gateway.answers.sse import StreamEncoder, receipt_facts
from gateway.answers.sse_writer import StreamedAnswer
from gateway.answers.unary import JsonAnswer, UnaryAnswer, cut_off_seconds
from gateway.deps import InferenceDeps
from gateway.errors import rate_limit_headers
from gateway.media import MediaSource, RequestMedia, supply
from gateway.request_facts import RequestFacts, facts_of
from weft.api.common.v1 import chat_pb2, image_pb2, warning_pb2
from weft.dispatch.call import Call, Layer, Proceed, warned
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.operation_table import operation_of
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.values.fast_dataclass import fast_dataclass


@fast_dataclass()
class Work:
    """A translated request with its HTTP scope."""

    deps: InferenceDeps
    scope: Scope
    context: RequestContext
    payload: GenerationPayload | image_pb2.ImagePayload
    warnings: Sequence[warning_pb2.Warning] = ()
    """The gateway's warnings for the caller."""
    media: RequestMedia | None = None
    """Media of the payload that have to be fetched."""
    layers: tuple[Layer[Frame], ...] = ()
    """Layers around the call, outside of the gateway's own."""

    def begin(self, *, whole: bool = False) -> Call[Frame]:
        """Returns the call. Nothing runs until its chunks are read."""
        call = self.deps.dispatcher.call(operation_of(self.payload), self.context, self.payload, whole=whole)
        if self.warnings:
            call.through(warned(self.warnings))
        facts = facts_of(self.scope)
        if self.media is not None and self.media.addresses:
            call.through(supplied(self.media, self.deps.media, facts))
        else:
            facts.was_dispatched = True
        return call.through(*self.layers) if self.layers else call

    def again(self, context: RequestContext, payload: chat_pb2.ChatPayload) -> Call[Frame]:
        """Returns the call of another pass of the model, for a layer."""
        return self.deps.dispatcher.call(operation_of(payload), context, payload)


def supplied(media: RequestMedia, source: MediaSource, facts: RequestFacts) -> Layer[Frame]:
    """Returns a layer that fetches the media of a chat first. A disconnect cancels the fetch. Raises as `supply`."""

    async def layer(call: Call[Frame], /, proceed: Proceed[Frame]) -> AsyncGenerator[Frame]:
        warnings = await supply(call.payload, media, source)
        facts.was_dispatched = True
        inner = partial(warned(warnings), proceed=proceed) if warnings else proceed
        async with aclosing(inner(call)) as frames:
            async for frame in frames:
                yield frame

    return layer


def streamed(work: Work, encoder: StreamEncoder) -> Response:
    """Returns the streamed response."""
    generation = work.begin()
    generation.joined_texts = encoder.reads_joined_texts and not work.layers
    return StreamedAnswer(work.deps, generation, encoder, cut_off_seconds=cut_off_seconds(work.deps, work.context))


def unary(work: Work, answer: AnswerBuilder) -> Response:
    """Returns the unary response."""
    deps, facts = work.deps, facts_of(work.scope)

    async def produce() -> JsonAnswer:
        generation = work.begin(whole=True)
        async with aclosing(generation.chunks()) as frames:
            async for frame in frames:
                answer.add(frame)
        body = answer.body()
        deps.metrics.tokens_used(facts, answer.usage)
        receipt = generation.receipt
        headers = [] if receipt is None else receipt_facts(receipt)
        headers += rate_limit_headers(generation.rate_limits)
        if answer.warnings:
            headers.append((b"x-weft-warnings", b"%d" % len(answer.warnings)))
        return JsonAnswer(body, headers, answer.media_type)

    return UnaryAnswer(produce, cut_off_seconds=cut_off_seconds(deps, work.context))
