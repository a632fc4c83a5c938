"""From a translated request to its answer, streamed or whole: what chat and text completions share."""

from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Scope

from gateway.facts import facts_of
from gateway.parts import InferenceParts
from gateway.stream import StreamedAnswer
from gateway.translate.answer import AnswerBuilder
from gateway.translate.sse import StreamEncoder, receipt_facts
from gateway.unary import JsonAnswer, UnaryAnswer
from weft.dispatch.frames import GenerationPayload
from weft.dispatch.journey import RequestContext


def streamed(
    parts: InferenceParts, scope: Scope, context: RequestContext, payload: GenerationPayload, encoder: StreamEncoder
) -> Response:
    """The answer as server-sent events."""
    facts_of(scope).was_dispatched = True
    generation = parts.dispatcher.generate(context, payload)
    return StreamedAnswer(parts, generation, encoder, cut_off_seconds=cut_off_seconds(parts, context))


def whole(
    parts: InferenceParts, scope: Scope, context: RequestContext, payload: GenerationPayload, answer: AnswerBuilder
) -> Response:
    """The answer in one piece."""
    facts = facts_of(scope)

    async def produce() -> JsonAnswer:
        facts.was_dispatched = True
        generation = parts.dispatcher.generate(context, payload)
        async with aclosing(generation.frames()) as frames:
            async for frame in frames:
                answer.add(frame)
        body = answer.body()
        parts.metrics.tokens_used(facts, answer.usage)
        receipt = generation.receipt
        told = [] if receipt is None else receipt_facts(receipt)
        if answer.warnings:
            told.append((b"x-weft-warnings", b"%d" % len(answer.warnings)))
        return JsonAnswer(body, told)

    return UnaryAnswer(produce, cut_off_seconds=cut_off_seconds(parts, context))


def cut_off_seconds(parts: InferenceParts, context: RequestContext) -> float:
    """When the edge itself ends a request that outlives its deadline."""
    timeout = parts.config.request_timeout_seconds if context.timeout_seconds is None else context.timeout_seconds
    return timeout + parts.config.deadline_slack_seconds
