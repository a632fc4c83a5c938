"""The registry's nouns as immutable values, free of transport and storage.

Two clocks appear here. Times called `..._at` are UTC and are shown or stored; times called `..._monotonic` are
seconds of this process's clock and carry every duration.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, IntEnum

from weft.kernel.reasons import Reason
from weft.kernel.request import Operation, Skill
from weft.wake.recipes import WakePlan


class Repetition(Enum):
    """What to do with an answer that repeats itself."""

    OFF = "off"
    WARN = "warn"
    KILL = "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBehaviour:
    """Features of the mesh that an agent uses around its chats; everything is off by default."""

    platform_prompt: bool = False
    """Whether the conversation begins with the platform's own system prompt."""
    tools: tuple[str, ...] = ()
    """Tools that the mesh runs for the model, by the names of the runner's configuration."""
    max_tool_iterations: int | None = None
    """How many times the model is called again with results of tools; None: the runner's own limit."""
    signals: tuple[str, ...] = ()
    """Control signals that the model may raise."""
    stop_on_decision_request: bool = True
    """Whether a signal that requests a decision ends the answer."""
    repetition: Repetition | None = None
    """None: the model's own setting."""
    parse_text_tool_calls: bool = True
    """Whether calls that the model writes as text count as calls."""


NO_BEHAVIOUR = AgentBehaviour()
"""The behaviour of an agent that uses none of the features."""


class Phase(IntEnum):
    """Phase of an instance; numbers as in `registry.v1.InstanceState.Phase`."""

    IDLE = 1
    LOADING = 2
    READY = 3
    DRAINING = 4
    STOPPING = 5
    CRASH_LOOP = 6
    FAILED = 7
    HIBERNATING = 8


class Kind(Enum):
    """Kind of a named resource. All kinds share one namespace; only a pool may have the name of a model."""

    MODEL = "model"
    AGENT = "agent"
    RUNNER = "runner"
    POOL = "pool"
    ROUTE = "route"


class Status(Enum):
    """Whether a model, an agent or a route can answer."""

    ACTIVE = "active"
    INACTIVE = "inactive"
    HIBERNATING = "hibernating"
    """It sleeps and a request wakes it."""


class Standing(Enum):
    """Whether a runner sends heartbeats, and if not, why. Only ACTIVE counts as alive."""

    ACTIVE = "active"
    """Heartbeats arrive."""
    SILENT = "silent"
    """None arrived for the inactive limit; the next one revives it."""
    CLOSED = "closed"
    """It closed its session; only a new OpenSession revives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A model as described by its runner or by a declaration."""

    name: str
    pool_name: str
    """Empty: a pool of its own."""
    operations: tuple[Operation, ...]
    context_tokens: int
    """0: unknown until loaded."""
    digest: str
    """ "sha256:<64 hex digits>", or empty."""
    remote: bool
    wake: WakePlan | None = None
    """How it can be woken; None: it never sleeps."""
    skills: tuple[Skill, ...] = ()
    """Capabilities beyond text, in the order of their numbers; empty: unknown."""

    @property
    def pool(self) -> str:
        """The effective pool: the declared one, or its own name."""
        return self.pool_name or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentManifest:
    """A named persona over a model or a pool."""

    name: str
    target: str
    """The model or the pool that answers, by name."""
    targets_pool: bool
    description: str
    system_prompt: str
    default_params: str
    """`common.v1.SamplingParams` in proto JSON with sorted keys: carried, never looked into."""
    behaviour: AgentBehaviour = NO_BEHAVIOUR
    """Features of the mesh around its chats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteManifest:
    """A ladder of models for one kind of task."""

    name: str
    description: str
    candidates: tuple[str, ...]
    """Models or pools, by name, best first; the first is the primary."""
    budget_seconds: float | None
    """Refuses requests that would take longer from arrival to end, before they begin; None: only their deadline."""
    keep_alive_seconds: float | None
    """How long the model stays loaded after a request; negative: until it is unloaded; None: as it is configured."""
    pin_primary: bool
    """Whether the primary is waited for as long as it is there at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredModel:
    """A public model, as an operator declared it."""

    manifest: Manifest
    runner: str
    """The only runner that may serve it; empty: the first live one that publishes this name."""
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredAgent:
    """A public agent, as an operator declared it."""

    manifest: AgentManifest
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredRoute:
    """A route, as an operator declared it."""

    manifest: RouteManifest
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSettings:
    """Settings of the whole mesh that operators change at run time."""

    allow_cloud_fallback: bool
    """Whether a route may fall back to a model that sends bytes off the premises."""
    revision: int
    """Counts up with every change, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """A token with which dial-out runners join. The secret itself is never kept."""

    id: str
    description: str
    secret_sha256: str = field(repr=False)
    """Lower-case hex."""
    created_at: datetime
    expires_at: datetime | None
    """None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMemory:
    """The accelerator memory of one model on one runner."""

    leased_bytes: int = 0
    """Memory of its lease; 0: it holds none."""
    measured_bytes: int | None = None
    """Memory that its processes were observed to hold; None: unknown."""
    estimated_bytes: int = 0
    """Estimated memory of a load; 0: unknown."""
    estimate_source: str = ""
    device_indexes: tuple[int, ...] = ()
    """The devices of its lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFault:
    """An unexpected end of a backend."""

    reason: Reason
    """UNSPECIFIED: of a runner that is newer than this registry."""
    detail: str
    """The signal or the exit code, and the likely cause where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One model on one runner right now."""

    model: str
    phase: Phase
    slots_total: int
    slots_used: int
    load_progress: float | None
    """Share of loading done, 0 to 1; None: unknown."""
    context_tokens: int
    """0: unknown."""
    detail: str
    memory: InstanceMemory | None = None
    """None: its runner reports none."""
    unload_at: datetime | None = None
    """When it goes to sleep if it stays idle; None: it does not."""
    pinned: bool = False
    """Whether it is never evicted for another model."""
    load_eta_seconds: float | None = None
    """None: unknown, or it does not load."""
    usual_load_seconds: float | None = None
    """Usual duration of a cold load; None: unknown."""
    fault_count: int = 0
    """How often its backend ended because of a fault since its runner started."""
    last_fault: InstanceFault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What a runner can serve right now."""

    instances: tuple[Instance, ...] = ()
    draining: bool = False
    max_requests: int = 0
    """Requests it works on at once over all its models; 0: as many as its slots."""
    tool_names: tuple[str, ...] = ()
    """Tools of the mesh that it has."""
    clock_offset_seconds: float = 0.0
    """How far its clock is ahead of this registry's; negative: behind; 0: not notably, or not measured."""
    clock_refused: bool = False
    """Whether that is more than is allowed, so that it takes no requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerProfile:
    """The facts of one incarnation of a runner, which do not change."""

    name: str
    incarnation: str
    address: str
    """A gRPC target."""
    host: str
    runtime: str
    version: str
    dial_out: bool = False
    """Whether it is reached over a link that it opened itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A runner's hold on its rows."""

    id: str = field(repr=False)
    """Secret: its holder owns the rows."""
    request_id: str
    """Of the OpenSession that made this incarnation; a repeat of that call gets the same session."""
    runner: str
    incarnation: str
    ticket_key: bytes = field(repr=False)
    """Key of this incarnation's tickets, known to the runner and the routers only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A model as its runner published it."""

    manifest: Manifest
    runner: str
    created_at: datetime
    """When the name was first published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPublication:
    """An agent as its runner published it."""

    manifest: AgentManifest
    runner: str
    created_at: datetime
    """When the name was first published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """A runner as the mesh sees it."""

    profile: RunnerProfile
    active: bool
    capability: Capability
    last_heartbeat_at: datetime
    inactive_since: datetime | None
    """None while it is active."""
    ticket_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as the mesh sees it: the declaration over the publication."""

    manifest: Manifest
    public: bool
    """Whether an operator declared it; otherwise it lives and expires with its runner."""
    runner: str
    """The runner that serves it; empty: none yet."""
    status: Status
    created_at: datetime
    last_heartbeat_at: datetime | None
    """Of its runner; None while it has none."""
    inactive_since: datetime | None
    """Since when its runner is gone; None while it is there."""
    declared_runner: str
    """The one runner that a public model is pinned to; empty: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent as the mesh sees it."""

    manifest: AgentManifest
    public: bool
    """Whether an operator declared it; otherwise it lives and expires with its runner."""
    runner: str
    """The runner that published it; empty for a public one."""
    status: Status
    created_at: datetime
    last_heartbeat_at: datetime | None
    """Of its runner; None for a public one."""
    inactive_since: datetime | None
    """Since when its runner is gone; None while it is there, and for a public one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route as the mesh sees it."""

    manifest: RouteManifest
    status: Status
    """The best that one of its candidates has."""
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The models that answer for one name."""

    name: str
    explicit: bool
    """Whether a member names it; otherwise it is the pool of one model."""
    members: tuple[Model, ...]
    """By name."""

    @property
    def active_count(self) -> int:
        """How many members are active."""
        return sum(model.status is Status.ACTIVE for model in self.members)


class EventReason(IntEnum):
    """Reason of an event; numbers as in `registry.v1.EventReason`."""

    REGISTERED = 1
    REVIVED = 2
    SILENT = 3
    CLOSED = 4
    HIBERNATED = 5
    WOKE = 6
    EXPIRED = 7
    DELETED = 8
    CREATED = 9
    CONFIGURED = 10
    WITHDRAWN = 11
    FAILED = 12
    READY = 13
    DIED = 14
    RESTARTED = 15
    UNOWNED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDraft:
    """An event of one resource, or of the mesh itself, before it is recorded."""

    kind: Kind | None
    """None: the mesh itself; then `name` is the part concerned, such as "settings"."""
    name: str
    reason: EventReason
    message: str
    """Text for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A recorded event."""

    sequence: int
    at: datetime
    draft: EventDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A validated OpenSession."""

    request_id: str
    session_id: str
    """Empty: a new session."""
    profile: RunnerProfile
    capability: Capability
    models: tuple[Manifest, ...]
    agents: tuple[AgentManifest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A validated Heartbeat."""

    session_id: str
    incarnation: str
    sequence: int
    capability: Capability | None
    """None: a heartbeat without a report; the last report stays valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDeclaration:
    """The wanted state of a public model."""

    manifest: Manifest
    runner: str
    """The one runner that may serve it; empty: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerDeclaration:
    """A runner that is expected to exist."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDeclaration:
    """A pool that is expected to exist."""

    name: str
    members: tuple[str, ...]
    """Empty: any members."""


Declaration = ModelDeclaration | AgentManifest | RouteManifest | RunnerDeclaration | PoolDeclaration


class Outcome(IntEnum):
    """Outcome of a declaration; numbers as in `registry.v1.ApplyResult.Outcome`."""

    CREATED = 1
    CONFIGURED = 2
    UNCHANGED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The result of one declaration."""

    kind: Kind
    name: str
    outcome: Outcome
    before: Declaration | None
    """None: it did not exist."""
    after: Declaration


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A validated Apply: declarations in their order, no two of one name."""

    declarations: tuple[Declaration, ...]
    dry_run: bool
    adopt: bool
