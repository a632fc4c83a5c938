"""What is known when loads are planned, and what was planned: the words of the load planner."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey
from weft.kernel.request import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A line in which requests wait, and the sleeping models that could serve them. Times are monotonic seconds."""

    queue: str
    asleep: tuple[Candidate, ...]
    """Those that could be loaded for its head requests, in the same order every time; at most 16."""
    waiting: int
    priority: Priority
    """Of the request whose turn is next in it."""
    oldest_arrived_at: float
    waited_seconds: float
    """Sum over all its waiting requests."""
    queued_tokens: float
    account: float = 0.0
    """Of the tenant whose turn is next in it; see fair_share."""
    ready_slots: int = 0
    """Slots of its members that are ready, in use or not; 0: it is cold."""
    loading_slots: int = 0
    """Slots of its members that load or wake without the planner's having begun it."""
    deadline_at: float | None = None
    """The earliest of its requests."""

    @property
    def is_durable(self) -> bool:
        """Whether durable requests wait, which have a demand of their own."""
        return self.priority is Priority.DURABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A model that takes requests on a host."""

    candidate: Candidate
    active: int
    """Requests that run on it."""
    durable_active: int = 0
    """Of them, durable ones."""
    queued_tokens: float = 0.0
    """What callers wait for: of its line, 0 where none waits."""
    durable_tokens: float = 0.0
    """The same of durable requests."""
    account: float = math.inf
    """Of the tenant whose turn is next there; infinite when nobody waits."""
    priority: Priority | None = None
    """Of the request whose turn is next there; None: nobody waits."""
    last_granted_at: float = -math.inf
    """When a request last went there; minus infinity: never."""
    last_used_at: float = -math.inf
    """When a caller's request there last ended; minus infinity: never."""
    since: float = -math.inf
    """When it became ready."""

    @property
    def is_wanted(self) -> bool:
        """Whether anybody uses it or waits for it."""
        return self.active > 0 or self.queued_tokens > 0 or self.durable_tokens > 0

    @property
    def serves_callers(self) -> bool:
        """Whether a caller uses it or waits for it."""
        return self.active > self.durable_active or self.queued_tokens > 0

    @property
    def serves_durable_only(self) -> bool:
        """Whether nobody but durable requests wants it."""
        return self.is_wanted and not self.serves_callers

    def idle_since(self) -> float:
        """Since when no caller has used it, where none does. What was not used since its load is kept for somebody."""
        return self.since if self.last_granted_at < self.since else self.last_used_at


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStart:
    """A model is to be woken now."""

    candidate: Candidate
    why: str
    """In words, for whoever asks for an explanation."""
    evicts: bool = False
    """Whether others give way for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadGate:
    """What a line waits for that cannot be loaded yet."""

    reason: str
    """Such as "VRAM: needs 5.1 GiB on host-a, held by qwen until idle"."""
    eta_seconds: float | None = None
    """Until its model takes requests; None: no estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to do about loads now."""

    begin: tuple[LoadStart, ...] = ()
    hold: frozenset[CandidateKey] = frozenset()
    """Models that give way: they finish what they have and take nothing new. Replaces what was held before."""
    instead: Mapping[CandidateKey, str] = field(default_factory=dict)
    """For each that is held, the model that is to be loaded in its place."""
    give_up: tuple[str, ...] = ()
    """Models whose load is under way and cannot get its memory: those who wait for it are better off in the queue."""
    gates: Mapping[str, LoadGate] = field(default_factory=dict)
    """By line; a line that is not named waits for nothing of this kind."""
    decided: frozenset[str] = frozenset()
    """Lines without a model whose load is certain, and only waits for its victims or for loads that come before it."""
