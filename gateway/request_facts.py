"""What the edge learns about one request while it runs, for its metrics and its log line."""

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
    """One request. Times are seconds on the gateway's monotonic clock."""

    request_id: str
    arrived: float
    surface: str = "none"
    """Which API: chat, completions, embeddings, messages, responses, tasks, models, api, health, metrics, or none."""
    model: str = UNKNOWN_MODEL
    """A name the fleet knows, or `unknown`: callers do not add names to the metrics."""
    was_dispatched: bool = False
    """Whether the dispatcher has it, and with it the duty to log."""
    status: int = 0
    """The HTTP status sent; 0 before that."""
    error: WeftError | None = None
    """Why it did not complete, also when the status was sent before."""
    principal: Principal = LOCAL
    """Who sends it, once it is let in."""
    dialect: Dialect = Dialect.OPENAI
    """In whose words it is answered."""
    task_id: str = ""
    """The durable task that it is, as soon as there is one; its answer says so, whichever it is."""


def facts_of(scope: Scope) -> RequestFacts:
    """The facts that the edge middleware began for this request."""
    return cast("RequestFacts", scope[FACTS_KEY])
