"""Facts about one HTTP request in progress, for its metrics and log line."""

from dataclasses import dataclass
from typing import cast

from starlette.types import Scope

from gateway.errors import Dialect
from weft.kernel.errors import WeftError
from weft.kernel.principal import LOCAL, Principal

FACTS_KEY = "weft.facts"
UNKNOWN_MODEL = "unknown"


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
    task_id: str = ""
    """The request's durable task, once there is one; every answer then has its id."""


def facts_of(scope: Scope) -> RequestFacts:
    """Returns the facts that the middleware created for this request."""
    return cast("RequestFacts", scope[FACTS_KEY])
