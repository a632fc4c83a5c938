"""Input and output of the load planner: demands, residents and the plan."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey
from weft.kernel.requests.request_values import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A queue with waiting requests and the sleeping models that could serve them. Times are monotonic seconds."""

    queue: str
    asleep: tuple[Candidate, ...]
    """Models that could be loaded for its next requests, in a stable order; at most 16."""
    waiting: int
    priority: Priority
    """Priority class of its next request."""
    oldest_arrived_at: float
    waited_seconds: float
    """Sum over all waiting requests."""
    queued_tokens: float
    tenant: str = ""
    """Tenant of its next request ..."""
    account: float = 0.0
    turn: int = 0
    """... and its account and turn; see fair_share."""
    ready_slots: int = 0
    """Slots of its ready members, free or not; 0: it is cold."""
    loading_slots: int = 0
    """Slots of members with a load or wake that the planner did not begin."""
    deadline_at: float | None = None
    """Earliest deadline of its requests."""

    @property
    def is_durable(self) -> bool:
        """Whether its requests are durable."""
        return self.priority is Priority.DURABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A ready model on a host."""

    candidate: Candidate
    active: int
    durable_active: int = 0
    queued_tokens: float = 0.0
    """Tokens that callers' requests wait for in its queues."""
    durable_tokens: float = 0.0
    """Tokens that durable requests wait for."""
    tenant: str = ""
    """The tenant that is served next; empty: no request waits."""
    account: float = math.inf
    """Its account; infinity: no request waits."""
    priority: Priority | None = None
    """Priority class of the next request; None: no request waits."""
    last_granted_at: float = -math.inf
    """Minus infinity: never."""
    last_used_at: float = -math.inf
    """Time at which a caller's request last ended; minus infinity: never."""
    since: float = -math.inf
    """Time at which it became ready."""
    awaits_tools: bool = False
    """Whether agents will soon send the results of their tools."""

    @property
    def is_wanted(self) -> bool:
        """Whether requests run on it or wait for it."""
        return self.active > 0 or self.queued_tokens > 0 or self.durable_tokens > 0

    @property
    def is_needed(self) -> bool:
        """Whether it is wanted, or will be soon."""
        return self.is_wanted or self.awaits_tools

    @property
    def serves_callers(self) -> bool:
        """Whether requests of callers run on it or wait for it."""
        return self.active > self.durable_active or self.queued_tokens > 0

    @property
    def serves_durable_only(self) -> bool:
        """Whether only durable requests use it or wait for it."""
        return self.is_wanted and not self.serves_callers

    def idle_since(self) -> float:
        """Return the time of its last use by a caller. A model that was not used since its load counts as used then."""
        return self.since if self.last_granted_at < self.since else self.last_used_at


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStart:
    """A wake to begin now."""

    candidate: Candidate
    why: str
    """Text for explanations."""
    evicts: bool = False
    """Whether other models are evicted for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGate:
    """What blocks a load that a queue waits for."""

    reason: str
    """Such as "VRAM: needs 5.1 GiB on host-a, held by qwen until idle"."""
    eta_seconds: float | None = None
    """Time until its model is ready; None: no estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to load, hold and give up now."""

    begin: tuple[LoadStart, ...] = ()
    hold: frozenset[CandidateKey] = frozenset()
    """Models to be evicted: they finish their requests and take no new ones. Replaces the previously held models."""
    instead: Mapping[CandidateKey, str] = field(default_factory=dict)
    """The model to be loaded in place of each held model."""
    give_up: tuple[str, ...] = ()
    """Models with a load under way that cannot get memory: the waiting requests return to the queue."""
    gates: Mapping[str, LoadGate] = field(default_factory=dict)
    """By queue; a queue without an entry is not blocked."""
    decided: frozenset[str] = frozenset()
    """Cold queues with a load that is certain and only waits for evictions or earlier loads."""
