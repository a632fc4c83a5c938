"""Runs a translated generation request and answers it, streamed or unary."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from starlette.responses import Response
from starlette.types import Scope
from typing_extensions import override

from gateway.answers.answer_builder import AnswerBuilder
from gateway.answers.sse import StreamEncoder, receipt_facts
from gateway.answers.stream import StreamedAnswer
from gateway.answers.unary import JsonAnswer, UnaryAnswer, cut_off_seconds
from gateway.deps import InferenceDeps
from gateway.media import RequestMedia, supply
from gateway.ports import Generation
from gateway.request_facts import facts_of
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, warning_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.request_trace import RequestContext


@dataclass(frozen=True, slots=True)
class Work:
    """A translated request with its HTTP scope."""

    deps: InferenceDeps
    scope: Scope
    context: RequestContext
    payload: GenerationPayload
    warnings: Sequence[warning_pb2.Warning] = ()
    """Warnings of the gateway for the caller."""
    media: RequestMedia | None = None
    """Media of a chat payload that are still to be fetched."""

    def begin(self) -> Generation:
        """Returns the generation. Nothing happens until its frames are read."""
        if self.media is not None and self.media.addresses:
            return SuppliedGeneration(self, self.media)
        return self.dispatched()

    def dispatched(self) -> Generation:
        """Returns the dispatched generation, without fetching media."""
        facts_of(self.scope).was_dispatched = True
        generation = self.deps.dispatcher.generate(self.context, self.payload)
        return WarnedGeneration(generation, self.warnings) if self.warnings else generation


class SuppliedGeneration(Generation):
    """A generation that fetches its media first. The caller's disconnect cancels the fetch, too."""

    def __init__(self, work: Work, media: RequestMedia) -> None:
        self._work = work
        self._media = media
        self._generation: Generation | None = None

    @override
    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        return None if self._generation is None else self._generation.receipt

    @override
    async def frames(self) -> AsyncGenerator[Frame]:
        """Raises as `gateway.media.supply`."""
        payload = self._work.payload
        assert isinstance(payload, chat_pb2.ChatPayload)
        await supply(payload, self._media, self._work.deps.media)
        self._generation = self._work.dispatched()
        async with aclosing(self._generation.frames()) as frames:
            async for frame in frames:
                yield frame


class WarnedGeneration(Generation):
    """A generation with the gateway's warnings beside those of its runner."""

    def __init__(self, generation: Generation, warnings: Sequence[warning_pb2.Warning]) -> None:
        self._generation = generation
        self._events = [event_pb2.InferenceEvent(warning=warning) for warning in warnings]

    @override
    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        return self._generation.receipt

    @override
    async def frames(self) -> AsyncGenerator[Frame]:
        """The warnings are added to each attempt: events of an earlier one are discarded."""
        async with aclosing(self._generation.frames()) as frames:
            async for frame in frames:
                yield self._with_warnings(frame)

    def _with_warnings(self, frame: Frame) -> Frame:
        for place, event in enumerate(frame, start=1):
            if event.HasField("started"):
                return [*frame[:place], *self._events, *frame[place:]]
        return frame


def streamed(work: Work, encoder: StreamEncoder) -> Response:
    """Returns the streamed response."""
    return StreamedAnswer(work.deps, work.begin(), encoder, cut_off_seconds=cut_off_seconds(work.deps, work.context))


def unary(work: Work, answer: AnswerBuilder) -> Response:
    """Returns the unary response."""
    deps, facts = work.deps, facts_of(work.scope)
    work = replace(work, context=replace(work.context, whole=True))

    async def produce() -> JsonAnswer:
        generation = work.begin()
        async with aclosing(generation.frames()) as frames:
            async for frame in frames:
                answer.add(frame)
        body = answer.body()
        deps.metrics.tokens_used(facts, answer.usage)
        receipt = generation.receipt
        headers = [] if receipt is None else receipt_facts(receipt)
        if answer.warnings:
            headers.append((b"x-weft-warnings", b"%d" % len(answer.warnings)))
        return JsonAnswer(body, headers)

    return UnaryAnswer(produce, cut_off_seconds=cut_off_seconds(deps, work.context))
