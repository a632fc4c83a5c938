"""The `status` of each kind: everything that is true now and that nobody declared. `apply` ignores it."""

from datetime import datetime
from typing import Literal

from weft.documents.document_base import DocumentPart

# "unknown" is what a registry of another version may say.
Owner = Literal["public", "virtual", "unknown"]
State = Literal["active", "inactive", "hibernating", "unknown"]
Phase = Literal["idle", "loading", "ready", "draining", "stopping", "crash-loop", "failed", "hibernating", "unknown"]


class Condition(DocumentPart):
    """One thing that does or does not hold, and why."""

    type: str
    """What it is about, such as "Ready"."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str
    """Why, in one word for programs, such as "CrashLoop"."""
    message: str
    """Why, in words for people."""


class MemoryStatus(DocumentPart):
    """The accelerator memory of one model on one runner."""

    leased_bytes: int
    """What its lease says; 0: it holds none."""
    measured_bytes: int | None = None
    """What its processes were seen to hold, where that can be seen."""
    estimated_bytes: int | None = None
    """What loading it takes or would take."""
    estimate_source: str | None = None
    """Where that comes from: learned, manifest, header, file_size or name."""
    device_indexes: tuple[int, ...] = ()
    """The devices of its lease, by number on the host."""


class InstanceStatus(DocumentPart):
    """One model on one runner."""

    model: str
    """The model, by name."""
    phase: Phase
    """Where it is in its life."""
    slots_total: int
    """Requests it can work on at once."""
    slots_used: int
    """Requests it works on."""
    load_progress: float | None = None
    """Share of loading done, 0 to 1."""
    context_tokens: int | None = None
    """Context of one slot, where it is known."""
    detail: str | None = None
    """Why it is in this phase, when that needs saying."""
    memory: MemoryStatus | None = None
    """Its accelerator memory, where its runner says anything of it."""
    unload_at: datetime | None = None
    """When it is unloaded if nothing is asked of it until then."""
    pinned: bool = False
    """Whether it is never evicted for another model."""
    load_eta_seconds: float | None = None
    """How long loading will still take, from earlier loads."""
    fault_count: int = 0
    """How often its backend ended because of a fault since its runner started."""
    last_fault: str | None = None
    """How it ended the last time: the signal or the exit code, and the likely cause where there is one."""


class ModelStatus(DocumentPart):
    """What is true of a model now."""

    kind: Owner
    """public: an operator declared it. virtual: a runner published it, and it goes with the runner."""
    state: State
    """Whether requests for it can be served; a hibernating one is woken by the next request."""
    pool: str
    """The pool it is in: `poolName`, or else its own name."""
    runner: str | None = None
    """The runner that serves it."""
    instance: InstanceStatus | None = None
    """How it does on that runner, while that is known."""
    created_at: datetime | None = None
    """When it was first declared or published."""
    last_heartbeat_at: datetime | None = None
    """When its runner was last heard of."""
    inactive_since: datetime | None = None
    """Since when its runner is gone."""
    conditions: tuple[Condition, ...] = ()
    """HasRunner, Awake and Ready."""


class AgentStatus(DocumentPart):
    """What is true of an agent now."""

    kind: Owner
    """public: an operator declared it. virtual: a runner published it, and it goes with the runner."""
    state: State
    """Whether it can answer."""
    runner: str | None = None
    """The runner that published it."""
    created_at: datetime | None = None
    """When it was first declared or published."""
    last_heartbeat_at: datetime | None = None
    """When its runner was last heard of."""
    inactive_since: datetime | None = None
    """Since when its runner is gone."""
    conditions: tuple[Condition, ...] = ()
    """Target and Ready."""


class RunnerStatus(DocumentPart):
    """What is true of a runner now."""

    state: State
    """Whether it is heard of."""
    incarnation: str
    """One life of its process."""
    address: str
    """Where its services are reached, as a gRPC target."""
    link: Literal["direct", "dial-out"]
    """Whether the mesh connects to it, or it holds a link to the mesh."""
    host: str
    """The host it runs on."""
    runtime: str
    """The runtime it serves."""
    version: str
    """The version of weft it runs."""
    draining: bool
    """Whether it finishes what runs and takes nothing new."""
    max_requests: int | None = None
    """Requests it works on at once over all its models; absent: as many as its slots."""
    instances: tuple[InstanceStatus, ...] = ()
    """Its models."""
    clock_offset_seconds: float | None = None
    """How far its clock is ahead of the mesh's, negative: behind; absent: not notably."""
    clock_refused: bool = False
    """Whether it takes no requests because of that."""
    last_heartbeat_at: datetime | None = None
    """When it was last heard of."""
    inactive_since: datetime | None = None
    """Since when it is gone."""
    conditions: tuple[Condition, ...] = ()
    """Connected and Ready."""


class MemberStatus(DocumentPart):
    """A model of a pool."""

    name: str
    """The model."""
    kind: Owner
    """Who declared it."""
    state: State
    """Whether it can be served."""
    runner: str | None = None
    """The runner that serves it."""


class PoolStatus(DocumentPart):
    """What is true of a pool now."""

    explicit: bool
    """Whether a member names it in its `poolName`; otherwise it is the pool of one model."""
    size: int
    """How many members it has."""
    active_count: int
    """How many of them are active."""
    members: tuple[MemberStatus, ...] = ()
    """Its members."""
    conditions: tuple[Condition, ...] = ()
    """Ready."""


class RouteStatus(DocumentPart):
    """What is true of a route now."""

    state: State
    """Whether it can answer: the best that one of its candidates has."""
    created_at: datetime | None = None
    """When it was first declared."""
    conditions: tuple[Condition, ...] = ()
    """Ready."""
