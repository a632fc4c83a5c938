"""Trace contexts, spans, and sampling.

Spans are created when their work has ended, from the same data as the receipt. A request that is not recorded costs
one comparison, and failed and slow requests can always be recorded. `weft_app.compose.span_export` sends spans to a
collector; `docs/observe.md` lists them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from hashlib import blake2b
from typing import Self

from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.structured_logs import new_span_id, new_trace_id, traceparent_of, valid_traceparent
from weft.kernel.values.fast_dataclass import fast_dataclass

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue]

_TRACE_BITS = 128
_SPAN_BITS = 64
_LOW_BITS = (1 << _SPAN_BITS) - 1
_SAMPLED = 0x01


class ServiceName(StrEnum):
    """The `service.name` of the component that did the work."""

    GATEWAY = "weft-gateway"
    ROUTER = "weft-router"
    RUNNER = "weft-runner"
    REGISTRY = "weft-registry"


class SpanName(StrEnum):
    """Span names that no convention defines."""

    QUEUE = "weft.queue"
    LOAD = "weft.load"
    ATTEMPT = "weft.attempt"
    GENERATE = "weft.generate"
    TASK = "weft.task"
    WAKE = "weft.wake"
    OPERATION = "weft.operation"
    STAGE = "weft.operation.stage"


class SpanKind(Enum):
    """OpenTelemetry span kinds."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class Attribute(StrEnum):
    """Attribute names: `http.*` and `error.type` are stable conventions, `gen_ai.*` is in development."""

    ERROR = "error.type"
    HTTP_METHOD = "http.request.method"
    HTTP_ROUTE = "http.route"
    HTTP_STATUS = "http.response.status_code"
    PATH = "url.path"
    RPC_SYSTEM = "rpc.system"
    RPC_SERVICE = "rpc.service"
    RPC_METHOD = "rpc.method"
    SCHEME = "url.scheme"
    HOST = "host.name"
    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    RESPONSE_MODEL = "gen_ai.response.model"
    AGENT = "gen_ai.agent.name"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    IMAGE_STEPS = "weft.usage.image_steps"
    IMAGE_PIXELS = "weft.usage.image_pixels"
    AUDIO_SECONDS = "weft.usage.audio_seconds"
    TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
    TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"  # noqa: S105 - a name
    END_TO_END = "gen_ai.latency.e2e"
    TIME_IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
    TIME_IN_DECODE = "gen_ai.latency.time_in_model_decode"
    TIME_IN_INFERENCE = "gen_ai.latency.time_in_model_inference"
    REQUEST_ID = "weft.request.id"
    TASK_ID = "weft.task.id"
    OPERATION_ID = "weft.operation.id"
    ACTION = "weft.operation.action"
    STAGE = "weft.operation.stage"
    TENANT = "weft.tenant"
    CALLER = "weft.caller"
    PRIORITY = "weft.priority"
    OUTCOME = "weft.outcome"
    RUNNER = "weft.runner"
    ATTEMPTS = "weft.attempts"
    ATTEMPT = "weft.attempt"
    LEFT_PREMISES = "weft.left_premises"
    WAIT_REASON = "weft.wait.reason"
    WAKE_REASON = "weft.wake.reason"
    LOAD_STAGE = "weft.load.stage"
    CANCELLED_BY = "weft.cancelled_by"
    DEVICE_TIME = "weft.gpu.time_seconds"
    DEVICE_ENERGY = "weft.gpu.energy_joules"


@fast_dataclass()
class TraceContext:
    """A span of a trace, as in a W3C `traceparent`."""

    trace_id: int
    span_id: int
    is_sampled: bool

    @classmethod
    def parse(cls, traceparent: str) -> Self:
        """Parses a valid traceparent."""
        _, trace, span, flags = traceparent.split("-", 3)
        return cls(int(trace, 16), int(span, 16), bool(int(flags[:2], 16) & _SAMPLED))

    @property
    def traceparent(self) -> str:
        """The `traceparent` header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{'01' if self.is_sampled else '00'}"

    def child(self, span_id: int) -> "TraceContext":
        """Returns the context of a child span."""
        return TraceContext(self.trace_id, span_id, self.is_sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Finished work in a trace. Times are nanoseconds since 1970."""

    name: str
    service: ServiceName
    context: TraceContext
    parent_id: int | None
    """None: the root span."""
    start: int
    end: int
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Attributes = field(default_factory=dict)
    error: str = ""
    """`error.type`: the failure reason in lower case; empty: success."""
    links: tuple[TraceContext, ...] = ()
    """Spans of other work that caused it."""


def span_id_of(name: str) -> int:
    """Returns a stable span id for something that outlives a process, derived from an id such as a task's."""
    return int.from_bytes(blake2b(name.encode(), digest_size=_SPAN_BITS // 8).digest()) or 1


def trace_id_from(name: str) -> int:
    """Returns a stable trace id for something that outlives a process and started outside a trace."""
    return int.from_bytes(blake2b(name.encode(), digest_size=_TRACE_BITS // 8).digest()) or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Which traces are recorded. The trace id decides, so that all services decide alike."""

    ratio: float = 0.01
    """Share of traces without a parent that are recorded, from 0 to 1."""
    follows_parent: bool = True
    """Whether the caller's sampling decision applies."""
    slow_seconds: float = 30.0
    """Slower requests are recorded."""
    records_failures: bool = True
    """Whether failed and slow requests are recorded regardless of `ratio`."""

    def chooses(self, trace_id: int) -> bool:
        """Whether the ratio includes a trace, as in the OpenTelemetry SDK's TraceIdRatioBased."""
        return (trace_id & _LOW_BITS) < self.ratio * (1 << _SPAN_BITS)

    def begin(self, header: str | None) -> tuple[TraceContext, TraceContext | None]:
        """Returns the context of a new span, and the caller's context if its `traceparent` header is valid."""
        found = valid_traceparent(header)
        if found is None:
            trace_id = new_trace_id()
            return TraceContext(trace_id, new_span_id(), self.chooses(trace_id)), None
        parent = TraceContext.parse(found)
        return self.below(parent, new_span_id()), parent

    def below(self, parent: TraceContext, span_id: int) -> TraceContext:
        """Returns the context of a new child span of a caller's span."""
        is_sampled = parent.is_sampled if self.follows_parent else self.chooses(parent.trace_id)
        return TraceContext(parent.trace_id, span_id, is_sampled)

    def records(self, context: TraceContext, *, has_failed: bool, seconds: float) -> bool:
        """Whether the spans of work that has ended are recorded."""
        return context.is_sampled or (self.records_failures and (has_failed or seconds > self.slow_seconds))


@dataclass(slots=True, kw_only=True)
class SpanCounts:
    """Numbers of a process's spans by outcome."""

    exported: int = 0
    dropped: int = 0
    """The queue was full."""
    failed: int = 0
    """The collector did not accept them."""


class Tracing:
    """Receives the spans of finished work. The base class discards them; `SpanExport` sends them."""

    def __init__(self, sampling: Sampling | None = None) -> None:
        self.sampling = sampling
        """None: tracing is off."""

    @property
    def counts(self) -> SpanCounts:
        """Counts of spans so far."""
        return SpanCounts()

    def records(self, context: TraceContext, *, has_failed: bool, seconds: float) -> bool:
        """Whether the spans of work that has ended are recorded."""
        return self.sampling is not None and self.sampling.records(context, has_failed=has_failed, seconds=seconds)

    def record(self, spans: Sequence[Span]) -> None:
        """Queues spans for export in another thread. Never waits; drops and counts spans if the queue is full."""

    def close(self) -> None:
        """Sends queued spans, for a bounded time. Blocks, so call it in a thread."""


NO_TRACING = Tracing()


def error_type(reason: Reason) -> str:
    """Returns the `error.type` of a reason; empty if there was no error."""
    return "" if reason is Reason.UNSPECIFIED else reason.name.lower()


def begin_trace(tracing: Tracing, header: str | None) -> tuple[str, TraceContext | None]:
    """Returns the traceparent of a request inside the mesh, and the caller's context.

    If tracing is off, it is the caller's traceparent or a new one, and the context is None.
    """
    if tracing.sampling is None:
        return traceparent_of({} if header is None else {"traceparent": header}), None
    context, parent = tracing.sampling.begin(header)
    return context.traceparent, parent
