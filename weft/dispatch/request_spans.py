"""The trace spans of a request, made from its trace and receipt when it has ended.

    POST /v1/chat/completions        made by the edge that received the request
      chat <model>                   the request: its tokens and how it ended
        weft.queue, weft.load        periods of waiting, by reason
        weft.attempt                 one per runner that was tried
          weft.generate              the engine's work, on the attempt that answered
            ...                      spans of the engine itself, if it records any

The runner's span is made here from its part of the receipt, because a laptop cannot reach a collector.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.dispatch.request_receipt import AttemptRecord, RequestTrace, WaitPeriod
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.structured_logs import new_span_id
from weft.kernel.telemetry.tracing import (
    Attribute,
    AttributeValue,
    ServiceName,
    Span,
    SpanKind,
    SpanName,
    TraceContext,
    error_type,
)
from weft.kernel.time.timestamps import seconds_of

PROVIDER = "weft"
"""`gen_ai.provider.name` of every request: the mesh has a single address, regardless of the engine."""

OPERATION_NAMES = {
    Operation.CHAT: "chat",
    Operation.COMPLETION: "text_completion",
    Operation.EMBEDDING: "embeddings",
}
"""Names in the conventions; other operations have weft's names."""


def request_spans(
    trace: RequestTrace, receipt: receipt_pb2.Receipt, service: ServiceName, *, ended: float, epoch: int
) -> list[Span]:
    """Returns the spans of a request that has ended; `service` is where its dispatcher runs.

    `ended` and all times in the trace are monotonic seconds; `epoch` is the Unix time of their zero in nanoseconds.
    """
    parent = TraceContext.parse(trace.context.traceparent)
    return list(_SpansOfRequest(trace, receipt, service, ended, epoch, parent, parent.child(new_span_id())))


@dataclass(frozen=True, slots=True)
class _SpansOfRequest:
    _trace: RequestTrace
    _receipt: receipt_pb2.Receipt
    _service: ServiceName
    _ended: float
    _epoch: int
    _parent: TraceContext
    _own: TraceContext

    def __iter__(self) -> Iterator[Span]:
        yield self._request()
        for period in self._trace.waits:
            yield self._wait(period)
        for number, attempt in enumerate(self._trace.attempts, 1):
            yield self._attempt(number, attempt)
        timings = self._receipt.engine_timings
        if self._trace.attempts and timings.HasField("wall_time"):
            yield self._generation(self._trace.attempts[-1], seconds_of(timings.wall_time))

    def _request(self) -> Span:
        context, receipt = self._trace.context, self._receipt
        operation = OPERATION_NAMES.get(context.operation, context.operation.name.lower())
        asked = self._trace.asked_model
        found: dict[str, AttributeValue] = {
            Attribute.OPERATION: operation,
            Attribute.PROVIDER: PROVIDER,
            Attribute.REQUEST_MODEL: asked,
            Attribute.REQUEST_ID: context.request_id,
            Attribute.TENANT: context.tenant,
            Attribute.CALLER: context.caller,
            Attribute.PRIORITY: context.priority.name.lower(),
            Attribute.OUTCOME: receipt_pb2.Outcome.Name(receipt.outcome).removeprefix("OUTCOME_").lower(),
            Attribute.ATTEMPTS: len(receipt.attempts),
            Attribute.LEFT_PREMISES: receipt.left_premises,
        }
        if receipt.attempts:
            found[Attribute.RESPONSE_MODEL] = receipt.model
        named = {
            Attribute.AGENT: context.agent,
            Attribute.TASK_ID: context.task_id,
            Attribute.CANCELLED_BY: receipt.cancelled_by,
        }
        found |= {name: text for name, text in named.items() if text}
        if receipt.HasField("usage"):
            found |= _usage(receipt.usage)
        return Span(
            name=f"{operation} {asked}",
            service=self._service,
            context=self._own,
            parent_id=self._parent.span_id,
            start=self._nanoseconds(self._trace.arrived),
            end=self._nanoseconds(self._ended),
            kind=SpanKind.CLIENT,
            attributes=found,
            error=error_type(Reason(receipt.reason)),
        )

    def _wait(self, period: WaitPeriod) -> Span:
        label = Attribute.LOAD_STAGE if period.is_load else Attribute.WAIT_REASON
        return Span(
            name=SpanName.LOAD if period.is_load else SpanName.QUEUE,
            service=ServiceName.ROUTER,
            context=self._parent.child(new_span_id()),
            parent_id=self._own.span_id,
            start=self._nanoseconds(period.began),
            end=self._nanoseconds(self._ended if period.ended is None else period.ended),
            attributes={label: period.reason} if period.reason else {},
        )

    def _attempt(self, number: int, attempt: AttemptRecord) -> Span:
        return Span(
            name=SpanName.ATTEMPT,
            service=self._service,
            context=self._parent.child(attempt.span_id),
            parent_id=self._own.span_id,
            start=self._nanoseconds(attempt.began),
            end=self._nanoseconds(self._ended if attempt.ended is None else attempt.ended),
            kind=SpanKind.CLIENT,
            attributes={
                Attribute.ATTEMPT: number,
                Attribute.RUNNER: attempt.grant.runner,
                Attribute.RESPONSE_MODEL: attempt.grant.model,
            },
            error=error_type(Reason(self._receipt.reason) if attempt.ended is None else attempt.reason),
        )

    def _generation(self, attempt: AttemptRecord, seconds: float) -> Span:
        """Returns the runner's span, aligned to the end of its attempt because the runner's clock may differ."""
        receipt, end = self._receipt, self._ended if attempt.ended is None else attempt.ended
        timings = receipt.engine_timings
        start = max(attempt.began, end - seconds)
        found: dict[str, AttributeValue] = {
            Attribute.OPERATION: OPERATION_NAMES.get(self._trace.context.operation, ""),
            Attribute.RESPONSE_MODEL: receipt.model,
            Attribute.RUNNER: attempt.grant.runner,
            Attribute.HOST: receipt.host,
            Attribute.END_TO_END: end - self._trace.arrived,
            Attribute.TIME_IN_QUEUE: seconds_of(receipt.queue_wait),
        }
        if receipt.HasField("time_to_first_token"):
            found[Attribute.TIME_TO_FIRST_TOKEN] = seconds_of(receipt.time_to_first_token)
        if timings.HasField("prefill_time"):
            found[Attribute.TIME_IN_PREFILL] = seconds_of(timings.prefill_time)
        if timings.HasField("decode_time"):
            found[Attribute.TIME_IN_DECODE] = seconds_of(timings.decode_time)
        if timings.HasField("prefill_time") and timings.HasField("decode_time"):
            found[Attribute.TIME_IN_INFERENCE] = seconds_of(timings.prefill_time) + seconds_of(timings.decode_time)
        device = receipt.device_usage
        if device.HasField("device_time"):
            found[Attribute.DEVICE_TIME] = seconds_of(device.device_time)
        if device.HasField("energy_millijoules"):
            found[Attribute.DEVICE_ENERGY] = device.energy_millijoules / 1e3
        return Span(
            name=SpanName.GENERATE,
            service=ServiceName.RUNNER,
            context=self._parent.child(attempt.generation_id),
            parent_id=attempt.span_id,
            start=self._nanoseconds(start),
            end=self._nanoseconds(end),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in found.items() if value != ""},
            error=error_type(Reason(receipt.reason)),
        )

    def _nanoseconds(self, moment: float) -> int:
        return self._epoch + int(moment * 1e9)


def _usage(usage: usage_pb2.Usage) -> dict[str, AttributeValue]:
    """Returns tokens, and the work on images and recordings if there was any."""
    found: dict[str, AttributeValue] = {
        Attribute.INPUT_TOKENS: usage.prompt_tokens,
        Attribute.OUTPUT_TOKENS: usage.completion_tokens,
        Attribute.CACHED_TOKENS: usage.cached_prompt_tokens,
    }
    media: dict[str, AttributeValue] = {
        Attribute.IMAGE_STEPS: usage.image_steps,
        Attribute.IMAGE_PIXELS: usage.image_pixels,
        Attribute.AUDIO_SECONDS: usage.audio_milliseconds / 1e3,
    }
    return found | {name: value for name, value in media.items() if value}
