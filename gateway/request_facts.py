"""Facts about one HTTP request in progress, for its metrics and log line, and its headers by name."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Scope

from gateway.errors import Dialect
from weft.dispatch.fleet import UNKNOWN_TARGET
from weft.kernel.access.principal import LOCAL, Principal
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.telemetry.tracing import TraceContext

FACTS_KEY = "weft.facts"
_HEADERS_KEY = "weft.headers"
Headers = Mapping[bytes, bytes]
UNKNOWN_MODEL = UNKNOWN_TARGET


@dataclass(slots=True)
class RequestFacts:
    """Facts about one request. Times are seconds on the gateway's monotonic clock."""

    request_id: str
    arrived: float
    surface: str = "none"
    """The API: chat, completions, embeddings, messages, responses, tasks, models, api, health, metrics, or none."""
    model: str = UNKNOWN_MODEL
    """A name of the fleet, or `unknown`, so that callers cannot add metric labels."""
    was_dispatched: bool = False
    """Whether the request was dispatched, after which the dispatcher logs it."""
    status: int = 0
    """The HTTP status sent; 0: none yet."""
    error: WeftError | None = None
    """Why the request failed, even after the status was sent."""
    principal: Principal = LOCAL
    """The caller, once authenticated."""
    dialect: Dialect = Dialect.OPENAI
    """The error format and headers of the answer."""
    trace: TraceContext | None = None
    """The request's span, the parent of what it causes in the mesh; None: tracing is off."""
    caller_span: TraceContext | None = None
    """The caller's span, from `traceparent`; None: not given."""
    task_id: str = ""
    """The request's durable task, which response headers then name."""


def headers_of(scope: Scope) -> Headers:
    """Returns the headers by lower-case name; of a repeated one the last. Cached: a request reads them ten times."""
    if _HEADERS_KEY not in scope:
        scope[_HEADERS_KEY] = dict(scope["headers"])
    found: Headers = scope[_HEADERS_KEY]
    return found


def facts_of(scope: Scope) -> RequestFacts:
    """Returns the facts that the middleware created for this request."""
    facts: RequestFacts = scope[FACTS_KEY]
    return facts
