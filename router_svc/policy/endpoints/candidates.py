"""The scheduler's view of the mesh: models on runners, their pools, host memory, and request needs."""

from dataclasses import dataclass, field
from enum import Enum

from router_svc.policy.endpoints.engine_load import EngineFigures
from weft.gpu.eviction import NEVER
from weft.kernel.requests.capabilities import ThinkingMode
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation, Priority, Skill
from weft.kernel.values.fast_dataclass import fast_dataclass

SURE_SHARE_OF_PROMPT = 0.5
"""Only half of the token estimate counts, as prompts are measured in characters: a request must not be refused for a
context that it would have fitted into."""


@fast_dataclass()
class Needs:
    """What a candidate must have to serve a request. Requests with equal needs are interchangeable."""

    operation: Operation
    allow_remote: bool = False
    skills: frozenset[Skill] = frozenset()
    thinking: ThinkingMode = ThinkingMode.DEFAULT
    tools: frozenset[str] = frozenset()
    context_tokens: int = 0
    """Rounded down to a power of two to limit the number of distinct needs; 0: unknown."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Names of the candidates of a route whose conditions exclude the request, each with the reason as text."""
    labels: frozenset[str] = frozenset()
    """Labels that the model or runner must have, as KEY=VALUE; from the conditions of a route's candidate."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Needs are hashed several times per request, and a dataclass would hash all fields each time.
        parts = (self.operation, self.allow_remote, self.skills, self.thinking, self.tools, self.context_tokens)
        object.__setattr__(self, "_hash", hash((parts, self.skipped, self.labels)))

    def __hash__(self) -> int:
        return self._hash


def needs_of(spec: PlacementRequest, *, allow_remote: bool) -> Needs:
    """Return the needs of a request; `allow_remote`: both the request and its tenant permit it."""
    return Needs(
        operation=spec.operation,
        allow_remote=allow_remote,
        skills=spec.skills,
        thinking=spec.thinking,
        tools=spec.tools,
        context_tokens=context_class(spec.prompt_tokens),
    )


def context_class(prompt_tokens: int) -> int:
    """Return `Needs.context_tokens` for a prompt of this estimated length."""
    sure = int(prompt_tokens * SURE_SHARE_OF_PROMPT)
    return 1 << (sure.bit_length() - 1) if sure else 0


CandidateKey = tuple[str, str, str]
"""Key of a candidate: model, runner, incarnation. See `Candidate.key`."""
EngineKey = tuple[str, str, str]
"""Key of an engine: the model that it was started for, runner, incarnation. See `Candidate.engine_key`."""
ModelHost = tuple[str, str]
"""A model on a host. See `Candidate.model_host`."""
RunnerKey = tuple[str, str]


class Readiness(Enum):
    """Whether a candidate accepts requests."""

    READY = "ready"
    LOADING = "loading"
    """Becomes ready without further action."""
    ASLEEP = "asleep"
    """Becomes ready after a wake."""
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One model on one runner incarnation."""

    model: str
    pool: str
    """The effective pool; never empty."""
    runner: str
    """Empty: no runner serves it."""
    incarnation: str
    """Empty: no runner is known."""
    readiness: Readiness
    slots: int
    slots_reported_used: int = 0
    """Slots in use by all clients in the runner's last report; seconds old."""
    engine: EngineFigures | None = None
    """The engine's own load figures; None: it has no request, or does not report them."""
    operations: frozenset[Operation]
    remote: bool = False
    """Whether it is served by a remote provider."""
    runner_max_requests: int = 0
    """Maximum number of requests on its runner over all models; 0: as many as its slots."""
    runner_wakes: bool = False
    max_wake_seconds: float = 0.0
    """Maximum duration of a wake; only used while it is asleep."""
    load_progress: float | None = None
    load_eta_seconds: float | None = None
    """Remaining load time reported by its runner; None: unknown, or not loading."""
    usual_load_seconds: float | None = None
    """Usual duration of a cold load reported by its runner; None: unknown."""
    detail: str = ""
    host: str = ""
    """Empty: unknown, or no runner serves it."""
    memory_bytes: int = 0
    """Accelerator memory that it uses while loaded; 0: none, or unknown."""
    pinned: bool = False
    """Whether it is never evicted for another model."""
    skills: frozenset[Skill] | None = None
    """Skills that a request may need: those it has and those that are unknown; None: any."""
    thinking_modes: frozenset[ThinkingMode] = frozenset()
    """Supported thinking modes; empty: unknown, and any mode may be requested."""
    clock_refused: bool = False
    """Whether its runner refuses requests because of its clock; it is then down, and `detail` has the difference."""
    tools: frozenset[str] = frozenset()
    """Mesh tools available on its runner."""
    labels: frozenset[str] = frozenset()
    """Labels of the model and its runner, as KEY=VALUE."""
    context_tokens: int = 0
    """Context of one slot; 0: unknown."""
    base_model: str = ""
    """The model that this adapter belongs to and shares an engine with; empty: it has its own engine."""
    state_kind: str = ""
    """What its engine can restore: equal ones can restore each other's stored prompts; empty: unknown."""
    key: tuple[str, str, str] = field(init=False, repr=False, compare=False)
    """Unique for the lifetime of the runner process."""
    model_host: ModelHost = field(init=False, repr=False, compare=False)
    """The model and its host, on which its speed depends; without a known host, the runner identifies the place."""

    def __post_init__(self) -> None:
        # Computed once, as they are read several times per request.
        object.__setattr__(self, "key", (self.model, self.runner, self.incarnation))
        object.__setattr__(self, "model_host", (self.model, self.host or self.runner))

    @property
    def engine_key(self) -> EngineKey:
        """Key of its engine, which adapters share with their base model."""
        return (self.base_model or self.model, self.runner, self.incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHolder:
    """A holder of memory on a host."""

    name: str
    """Name of a model, or the name that a program chose."""
    is_model: bool
    """Whether `name` is a model of the mesh, which can be evicted if it is idle and not pinned; programs cannot."""
    held_bytes: int
    pinned: bool = False
    is_leaving: bool = False
    """Whether its memory is being released."""
    is_lost: bool = False
    """Whether its runner is silent and its memory has not been observed as free."""
    active_requests: int = 0
    """Running requests in its runner's last report."""
    unowned: bool = False
    """Whether its owner left the mesh, so that no load can rely on its eviction."""
    priority: Priority = Priority.NORMAL
    """Priority class of its last request."""
    last_used_at: float = NEVER
    """End of its last request in its runner's last report, in Unix seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Accelerator memory of a host according to the registry's VRAM ledger.

    Memory that is neither free nor in `holders` belongs to processes without a lease.
    """

    host: str
    total_bytes: int
    """Total of all devices without the margins that are never leased."""
    free_bytes: int
    """Memory available to a new lease."""
    holders: tuple[MemoryHolder, ...] = ()
