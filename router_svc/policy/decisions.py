"""Decisions of the scheduler about requests and wakes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.endpoints.choice import Choice, Considered
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.fast_dataclass import fast_dataclass


@fast_dataclass(kw_only=True)
class Placed:
    """The request runs on this candidate."""

    key: int
    candidate: Candidate
    attempt: int
    choice: Choice | None = None
    """How it was selected; None: not recorded."""
    keep_alive_seconds: float | None = None
    """The route's keep-alive; None: not set."""
    deadline_at: float | None = None
    """Its own or its route's deadline, whichever is earlier; None: no deadline."""


class WaitKind(StrEnum):
    """What a request waits for; a label of metrics."""

    SLOT = "slot"
    """All slots of its models are busy."""
    PROMPT = "prompt"
    """The endpoint with its earliest first token takes no prompt now, although another one does."""
    TENANT = "tenant"
    """Its tenant is at its concurrency cap."""
    POOL = "pool"
    """Its pool is at its concurrency cap."""
    EVICTION = "eviction"
    """Its model is being evicted for another one."""
    UNHEALTHY = "unhealthy"
    """Runners are excluded because of their failures."""
    MEMORY = "memory"
    """No model that can serve it is loaded, and the load waits for memory or its turn."""
    LOAD = "load"
    """Its model is loading or waking."""


@fast_dataclass(kw_only=True)
class Waits:
    """The request waits for a slot."""

    key: int
    position: int
    reason: str
    kind: WaitKind = WaitKind.SLOT
    eta_seconds: float | None = None
    """None: no estimate."""
    considered: tuple[Considered, ...] = ()
    """The candidates and why each cannot take the request; only in the first status."""


@fast_dataclass(kw_only=True)
class Loads:
    """The request waits for a model that loads or wakes."""

    key: int
    stage: str
    progress: float | None
    """0 to 1; None: unknown."""
    eta_seconds: float | None = None


@fast_dataclass(kw_only=True)
class Rejects:
    """The request is refused and leaves the scheduler."""

    key: int
    reason: Reason
    message: str
    retry_after_seconds: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wakes:
    """Wake a sleeping model, once for all waiting requests; `wake_finished` must follow."""

    model: str
    runner: str
    """The runner it slept on at the time of the decision; empty: unknown."""
    max_wait_seconds: float
    doubted: bool = False
    """Whether the registry shows it as ready while its runner reports it as asleep."""
    priority: Priority = Priority.NORMAL
    why: str = field(default="", compare=False)
    """The reason as text, for explanations; empty: none."""
    request: int | None = field(default=None, compare=False)
    """Key of the request that it is woken for; None: that request has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopsWaking:
    """End a wake whose runner waits in vain for memory; `wake_finished` must follow."""

    model: str


@fast_dataclass(kw_only=True)
class Served:
    """The tokens that a finished request used."""

    prompt_tokens: int
    """Prompt tokens, including cached ones."""
    cached_tokens: int
    """Prompt tokens that came from a cache."""
    output_tokens: int
    energy_joules: float | None = None
    """Its share of the energy of the accelerators; None: not measured."""
    awaits_tool_results: bool = False
    """Whether its answer ended with calls of the caller's tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeFailure:
    """Why a wake failed."""

    reason: Reason
    """INSUFFICIENT_MEMORY: the wake is not possible now, which is a failure only if the host is too small. One of
    `LOST_RUNNER`: the runner may return."""
    message: str


LOST_RUNNER = frozenset({Reason.WORKER_LOST, Reason.RUNNER_UNREACHABLE})
"""Reasons of wakes whose runner was lost while it woke the model, or could not be connected to."""


RequestDecision = Placed | Waits | Loads | Rejects
Decision = RequestDecision | Wakes | StopsWaking


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A failed attempt; it was retried if a `Placed` follows."""

    attempt: int
    reason: Reason
    message: str = ""
    """The error text; empty: unknown."""
    has_content: bool = False
    """Whether the answer had begun."""


@dataclass(frozen=True, slots=True)
class Pauses:
    """A task waits for its next attempt."""

    attempt: int
    """The next one."""
    seconds: float
    failed_count: int
    max_attempts: int


@dataclass(frozen=True, slots=True)
class LoadStart:
    """The start of a load that the request waits for."""

    wakes: Wakes
    at: float


Noted = Waits | Loads | Placed | Rejects | FailedAttempt | LoadStart | Pauses
