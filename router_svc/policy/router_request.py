"""A request in the router, from arrival to end."""

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from math import inf

from router_svc.policy.decisions import FailedAttempt, Loads, Noted, Placed, Rejects, Waits
from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, Needs, needs_of
from router_svc.policy.endpoints.first_token import FirstToken
from router_svc.policy.endpoints.load_balancer import BestEndpoint
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft.kernel.values.fast_dataclass import fast_dataclass


class WorkUnit(StrEnum):
    """The unit of the work of a request."""

    TOKENS = "tokens"
    STEP_MEGAPIXELS = "step_megapixels"
    """Denoising steps times the megapixels of all images."""
    AUDIO_SECONDS = "audio_seconds"
    CHARACTERS = "characters"


MEDIA_UNITS = {
    Operation.IMAGE: WorkUnit.STEP_MEGAPIXELS,
    Operation.TRANSCRIPTION: WorkUnit.AUDIO_SECONDS,
    Operation.SPEECH: WorkUnit.CHARACTERS,
}
UNITS = {Operation.CHAT: WorkUnit.TOKENS, Operation.COMPLETION: WorkUnit.TOKENS, **MEDIA_UNITS}
"""Units of all operations with measured work, which excludes embeddings, for example."""


QueuePosition = tuple[float, float, int]
"""Deadline or infinity, arrival, key: a tenant's lowest is served first."""


@fast_dataclass()
class RequestKind:
    """Properties that make requests of a queue interchangeable."""

    needs: Needs
    excluded: frozenset[CandidateKey] = frozenset()
    """Candidates on which an attempt failed."""
    failed_wakes: frozenset[str] = frozenset()
    """Models whose wake failed while the request waited; it does not wake them again."""
    durable: bool = False
    """Durable requests have separate classes, so that figures for callers exclude them."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Kinds are hashed several times per request, and a dataclass would hash all fields each time.
        object.__setattr__(self, "_hash", hash((self.needs, self.excluded, self.failed_wakes, self.durable)))

    def __hash__(self) -> int:
        return self._hash

    def without(self, candidate: CandidateKey) -> "RequestKind":
        """Return the kind after a failed attempt on a candidate."""
        return replace(self, excluded=self.excluded | {candidate})

    def not_waking(self, model: str) -> "RequestKind":
        """Return the kind after a failed wake of a model."""
        return replace(self, failed_wakes=self.failed_wakes | {model})


class EstimatedPart(StrEnum):
    """What is estimated. Waits are much less certain than answers, so their errors are kept apart."""

    FIRST = "first"
    FIRST_AFTER_WAIT = "first_after_wait"
    END = "end"
    END_AFTER_WAIT = "end_after_wait"


@dataclass(slots=True, kw_only=True)
class Estimate:
    """The expected times of a request on one queue_key, in seconds from its arrival."""

    candidate: Candidate
    wait: float
    """For a slot or a load."""
    first: float
    end: float
    output_tokens: float
    first_most: float = inf
    """What nine of ten such requests keep; infinity: not computed."""
    end_most: float = inf

    @property
    def first_part(self) -> EstimatedPart:
        """Return what `first` estimates."""
        return EstimatedPart.FIRST_AFTER_WAIT if self.wait else EstimatedPart.FIRST

    @property
    def end_part(self) -> EstimatedPart:
        """Return what `end` estimates."""
        return EstimatedPart.END_AFTER_WAIT if self.wait else EstimatedPart.END


@dataclass(slots=True, eq=False)
class Request:
    """A request from arrival to end. Times are seconds on the router's monotonic clock."""

    key: int
    """The router's number for it, as callers may reuse request ids."""
    spec: PlacementRequest
    needs: Needs
    arrived_at: float
    """First arrival at any router, so that a repeated placement keeps its place in the queue."""
    own_deadline_at: float | None = None
    deadline_at: float | None = None
    """Its own or its route's deadline, whichever is earlier."""
    attempt: int = 0
    kind: RequestKind = field(init=False)
    queue: str = field(init=False)
    queue_key: QueuePosition = field(init=False)
    """Its position among its tenant's requests."""
    cost: float = 0.0
    """Estimated charge in tokens."""
    expected_work: float = 0.0
    """Expected work in its unit when it arrived; see `Estimates.expected_work`."""
    keep_alive_seconds: float | None = None
    """The route's keep-alive."""
    charged: float = 0.0
    """Tokens charged to its tenant for the running attempt."""
    queued_since: float = 0.0
    """Start of the queue timeout while it waits."""
    waited_seconds: float = 0.0
    """Total wait so far; set while it does not wait."""
    in_queue_since: float = 0.0
    """When it last began to wait ..."""
    in_queue_seconds: float = 0.0
    """... and how long it had waited before, loads included."""
    passed_over: int = 0
    """Later requests of its tenant that were placed before it because of their cached prompts."""
    bounces: int = 0
    failures: int = 0
    """Broken attempts and failed wakes."""
    is_retry: bool = False
    """Whether an attempt broke."""
    placed_on: Candidate | None = None
    holds_slot: bool = True
    """Whether it occupies a slot while placed; False: it runs beside the slots."""
    placed_at: float = 0.0
    expected: FirstToken | None = None
    """While placed: its expected time to the first token; None: its endpoint was chosen otherwise."""
    content_at: float | None = None
    prefill_seconds: float = 0.0
    """How long its engine took for its prompt, without those before it."""
    awaited: BestEndpoint | None = None
    """While it waits: the endpoint with its earliest first token, usually not free; None: it is not decided."""
    estimate: Estimate | None = None
    """Its times as expected when it arrived; None: they are not estimated, or nothing is known."""
    waits: bool = False
    """Whether it is in its queue, in the request class of its kind."""
    last_failure: Rejects | None = None
    """The refusal it gets if no attempt is left."""
    last_status: Waits | Loads | None = None
    status_at: float = 0.0
    has_status: bool = False
    arrived_wall: datetime = field(init=False, default=datetime.min.replace(tzinfo=UTC))
    """UTC, once it is recorded."""
    decisions: list[tuple[float, Noted]] = field(default_factory=list)
    """Decisions with their times, for its record; status messages that differ only in figures are merged."""
    status: Waits | Loads | Placed | FailedAttempt | None = None
    """The last of these."""
    budget_left: float = 1.0
    """Share of its tightest rate limit window that was left when it arrived."""
    cancelled_by: str = ""
    """Who cancelled it; empty: it was not cancelled."""

    @staticmethod
    def of(key: int, spec: PlacementRequest, now: float, *, allow_remote: bool = False) -> "Request":
        """Return a request that arrives now; `allow_remote`: both the request and its tenant permit it."""
        return Request(
            key,
            spec,
            needs_of(spec, allow_remote=allow_remote),
            arrived_at=now - spec.age_seconds,
            own_deadline_at=None if spec.seconds_left is None else now + spec.seconds_left,
        )

    @property
    def uncached_tokens(self) -> int:
        """Return the prompt tokens that its endpoint must process before the first token."""
        return self.spec.prompt_tokens if self.expected is None else self.expected.uncached_tokens

    def enter(self, queue: str, kind: RequestKind, deadline_at: float | None, now: float) -> None:
        """Assign it to a queue; it neither waits nor runs yet."""
        self.queue, self.kind, self.deadline_at = queue, kind, deadline_at
        self.queue_key = (inf if deadline_at is None else deadline_at, self.arrived_at, self.key)
        self.attempt = self.spec.attempts_used
        self.waited_seconds = self.in_queue_seconds = max(0.0, now - self.arrived_at)
