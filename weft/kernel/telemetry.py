"""Structured logs, and the trace context that travels with every request.

Logs are pretty on a terminal and JSON lines otherwise, always on stderr. The trace context is W3C `traceparent`: a
caller's is carried on to the backend, a missing one is made up at the edge, so that every log line of a request has the
same trace id on every hop.
"""

import logging
import sys
from collections.abc import Mapping

import structlog
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanContext, TraceFlags, format_span_id, format_trace_id, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"

_propagator = TraceContextTextMapPropagator()
_new_ids = RandomIdGenerator()


def configure_logging(service: str, *, level: str = "info", pretty: bool | None = None) -> None:
    """Send this process's logs to stderr; `service` is on every line. `pretty` defaults to: stderr is a terminal."""
    pretty = sys.stderr.isatty() if pretty is None else pretty
    threshold = logging.getLevelNamesMapping()[level.upper()]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer()
    )
    exceptions = [] if pretty else [structlog.processors.dict_tracebacks]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *exceptions,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(stream=sys.stderr, level=max(threshold, logging.WARNING), format="%(message)s")


def valid_traceparent(header: str | None) -> str | None:
    """`header` if it is a well-formed traceparent, otherwise None: a broken one from outside is not passed on."""
    if header is None:
        return None
    context = _propagator.extract({TRACEPARENT: header})
    span = get_current_span(context).get_span_context()
    return header if span.is_valid else None


def new_traceparent() -> str:
    """A traceparent for a request that came without one; sampled."""
    span = SpanContext(
        trace_id=_new_ids.generate_trace_id(),
        span_id=_new_ids.generate_span_id(),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    return f"00-{format_trace_id(span.trace_id)}-{format_span_id(span.span_id)}-{int(span.trace_flags):02x}"


def trace_id_of(traceparent: str) -> str:
    """The trace id inside a traceparent, for log lines."""
    return traceparent.split("-", 2)[1]


def traceparent_of(metadata: Mapping[str, str]) -> str:
    """The caller's traceparent from metadata or headers, or a fresh one."""
    return valid_traceparent(metadata.get(TRACEPARENT)) or new_traceparent()
