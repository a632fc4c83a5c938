"""The registry's nouns as immutable values, free of transport and storage.

Two clocks appear here. Times called `..._at` are UTC and are shown or stored; times called `..._monotonic` are
seconds of this process's clock and carry every duration.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, IntEnum

from weft.kernel.request import Operation


class Phase(IntEnum):
    """Where an instance is in its life; numbers as in `registry.v1.InstanceState.Phase`."""

    IDLE = 1
    LOADING = 2
    READY = 3
    DRAINING = 4
    STOPPING = 5
    CRASH_LOOP = 6
    FAILED = 7


class Standing(Enum):
    """Whether a runner is heard of, and if not, why. Only ACTIVE counts as alive."""

    ACTIVE = "active"
    """Heartbeats arrive."""
    SILENT = "silent"
    """None arrived for the inactive limit; the next one revives it."""
    CLOSED = "closed"
    """It said good-bye; only a new OpenSession revives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a runner says about a model it publishes."""

    name: str
    pool_name: str
    """Empty: a pool of its own."""
    operations: tuple[Operation, ...]
    context_tokens: int
    """0: unknown until loaded."""
    digest: str
    """ "sha256:<64 hex digits>", or empty."""
    remote: bool


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """What a runner can take on right now."""

    instances: tuple[Instance, ...] = ()
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerProfile:
    """What stays the same for one incarnation of a runner."""

    name: str
    incarnation: str
    address: str
    """A gRPC target."""
    host: str
    runtime: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A runner's hold on its rows."""

    id: str = field(repr=False)
    """Whoever knows it owns the rows."""
    request_id: str
    """Of the OpenSession that made this incarnation; a repeat of that call gets the same session."""
    runner: str
    incarnation: str
    ticket_key: bytes = field(repr=False)
    """Key of this incarnation's tickets: told to the runner and to routers, to nobody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A model as its runner published it."""

    manifest: Manifest
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
    ticket_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as the mesh sees it."""

    publication: Publication
    active: bool
    """Follows its runner."""


@dataclass(frozen=True, slots=True)
class RunnerChanged:
    """A runner appeared, or is different now."""

    runner: Runner


@dataclass(frozen=True, slots=True)
class ModelChanged:
    """A model appeared, or is different now."""

    model: Model


@dataclass(frozen=True, slots=True)
class RunnerDeleted:
    """The runner of this name is gone."""

    name: str


@dataclass(frozen=True, slots=True)
class ModelDeleted:
    """The model of this name is gone."""

    name: str


Change = RunnerChanged | ModelChanged | RunnerDeleted | ModelDeleted


@dataclass(frozen=True, slots=True)
class Revised:
    """One change, and the revision it made."""

    revision: int
    change: Change


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything there is at one revision."""

    revision: int
    runners: tuple[Runner, ...]
    models: tuple[Model, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A validated OpenSession."""

    request_id: str
    session_id: str
    """Empty: a new session."""
    profile: RunnerProfile
    capability: Capability
    models: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A validated Heartbeat."""

    session_id: str
    incarnation: str
    sequence: int
    capability: Capability | None
    """None: a bare sign of life, the last report stands."""
