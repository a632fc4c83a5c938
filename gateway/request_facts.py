"""Facts about one HTTP request in progress, for its metrics and log line, and its headers by name."""

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Scope

from gateway.errors import Dialect
from weft.dispatch.fleet import UNKNOWN_TARGET
from weft.kernel.errors import WeftError
from weft.kernel.principal import LOCAL, Principal
from weft.kernel.tracing import TraceContext

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
    """A name the fleet knows, or `unknown`: callers do not add names to the metrics."""
    was_dispatched: bool = False
    """Whether the request was dispatched; the dispatcher then logs it."""
    status: int = 0
    """The HTTP status sent; 0 before that."""
    error: WeftError | None = None
    """Why the request failed, also after the status was sent."""
    principal: Principal = LOCAL
    """The caller, once authenticated."""
    dialect: Dialect = Dialect.OPENAI
    """The error format and headers of the answer."""
    trace: TraceContext | None = None
    """Its span, and that of what it causes in the mesh; None: tracing is off."""
    caller_span: TraceContext | None = None
    """The span of its caller, as its `traceparent` says; None: it has none."""
    task_id: str = ""
    """The request's durable task, once there is one; every answer then has its id."""


def headers_of(scope: Scope) -> Headers:
    """Returns the headers by lower-case name; of a repeated one the last. They are looked up some ten times."""
    found: Headers | None = scope.get(_HEADERS_KEY)
    if found is None:
        found = scope[_HEADERS_KEY] = dict(scope["headers"])
    return found


def facts_of(scope: Scope) -> RequestFacts:
    """Returns the facts that the middleware created for this request."""
    facts: RequestFacts = scope[FACTS_KEY]
    return facts
