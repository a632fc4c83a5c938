"""In-memory state of a session and its publications."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from registry_svc.mesh.overlay import Publisher, watched_runner
from registry_svc.mesh.policy.heartbeat import Holder, Pulse, alive_pulse, lost, share_of
from registry_svc.mesh.records import Held, detail_bytes, is_loaded
from registry_svc.mesh.states import Session, Standing
from registry_svc.mesh.store import StoredPulse, StoredSession
from weft.api.registry.v1 import agent_pb2, model_pb2, registry_service_pb2, runner_pb2
from weft.documents.conditions import UNUSABLE
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.time.timestamps import optional_stamp, stamp_of


@dataclass(slots=True, kw_only=True)
class SessionState:
    """A session with its runner, models and agents. Only the mesh and the session manager change it."""

    session: Session
    profile: runner_pb2.Runner
    """Immutable facts of this incarnation; see `registry_svc.mesh.store.profile_of`."""
    pulse: Pulse
    last_heartbeat_at: datetime
    inactive_since: datetime | None = None
    capability: Held[runner_pb2.Capability] = field(default_factory=lambda: Held(runner_pb2.Capability()))
    reported: bool = False
    """Whether `capability` is a report of this incarnation; otherwise it is empty."""
    sequence: int | None = None
    """Newest heartbeat of this incarnation; None before the first."""
    publications: dict[str, Held[model_pb2.Model]] = field(default_factory=dict)
    agents: dict[str, agent_pb2.Agent] = field(default_factory=dict)
    waking: frozenset[str] = frozenset()
    """Models that hibernated and have not accepted requests since."""
    unowned: frozenset[str] = frozenset()
    """Models that it has loaded but no longer publishes."""
    left_out: tuple[runner_pb2.LeftOut, ...] = ()
    """What the registry left out when the session was opened."""
    saved_pulse: Pulse | None = None
    """Stored liveness; None: not stored."""
    share: float = field(init=False)
    """Position in a spread of expiries."""
    sleeping: frozenset[str] = field(init=False)
    """Names of its hibernating models."""
    failed: frozenset[str] = field(init=False)
    """Names of models that it cannot serve."""
    listed: frozenset[str] = field(init=False)
    """Names that come from the lists of servers."""
    runtimes: Mapping[str, str] = field(init=False)
    """Runtimes that differ from the runner's, by model name."""
    detail_bytes: int = field(init=False)
    """Size of the detail texts of its last report."""
    _publisher: Publisher | None = field(init=False, default=None)
    """Cached `publisher`; None after a change."""

    def __post_init__(self) -> None:
        self.share = share_of(self.profile.name)
        self._note(self.capability.message())

    def withdraw(self, model: str) -> None:
        """Withdraws a model, which becomes unowned if it is still loaded."""
        del self.publications[model]
        loaded = any(each.model == model and is_loaded(each) for each in self.capability.message().instances)
        self.unowned |= {model} if loaded else frozenset()

    def report(self, capability: runner_pb2.Capability) -> None:
        """Records a capability report. Only call it through the mesh, which counts sizes."""
        self.capability = Held(capability)
        self._note(capability)
        self.reported = True
        self._publisher = None

    def _note(self, capability: runner_pb2.Capability) -> None:
        self.sleeping = _in_phase(capability, runner_pb2.InstanceState.PHASE_HIBERNATING)
        self.failed = _in_phase(capability, *UNUSABLE)
        self.runtimes = _runtimes(capability)
        self.listed = listed_in(capability)
        self.detail_bytes = detail_bytes(capability)

    def revive(self, now: float, now_utc: datetime) -> None:
        """Records a heartbeat."""
        self.pulse = alive_pulse(now)
        self.last_heartbeat_at = now_utc
        self.inactive_since = None
        self._publisher = None

    def lose(self, standing: Standing, now: float, now_utc: datetime) -> None:
        """Marks the runner as inactive from now on, or since earlier."""
        self.pulse = lost(self.pulse, standing, now)
        self.inactive_since = self.inactive_since or now_utc
        self._publisher = None

    def runner(self) -> registry_service_pb2.WatchedRunner:
        """Returns the runner for watchers, with its ticket key."""
        return watched_runner(self.publisher(), with_key=True)

    def publisher(self) -> Publisher:
        """Returns an immutable view of the runner's current state."""
        if self._publisher is None:
            self._publisher = Publisher(
                profile=self.profile,
                ticket_key=self.session.ticket_key,
                capability=self.capability,
                active=self.pulse.active,
                sleeping=self.sleeping,
                failed=self.failed,
                runtimes=self.runtimes,
                last_heartbeat_time=stamp_of(self.last_heartbeat_at),
                inactive_time=optional_stamp(self.inactive_since),
            )
        return self._publisher

    def as_holder(self) -> Holder:
        """Returns the session for the policy."""
        return Holder(session=self.session, live=self.pulse.active, address=self.profile.address)

    def rows(self) -> Iterator[tuple[ResourceKind, str]]:
        """Yields its resources: agents before the models that they may point to, the runner last."""
        yield from ((ResourceKind.AGENT, name) for name in self.agents)
        yield from ((ResourceKind.MODEL, name) for name in self.publications)
        yield ResourceKind.RUNNER, self.profile.name

    def stored(self) -> StoredSession:
        """Returns the session and its resources for storage."""
        return StoredSession(
            session=self.session,
            profile=self.profile,
            pulse=self.stored_pulse(),
            publications=tuple(each.message() for each in self.publications.values()),
            agents=tuple(self.agents.values()),
        )

    def stored_pulse(self) -> StoredPulse:
        """Returns its liveness for storage."""
        return StoredPulse(
            runner=self.profile.name,
            standing=self.pulse.standing,
            last_heartbeat_at=self.last_heartbeat_at,
            inactive_since=self.inactive_since,
        )


def listed_in(capability: runner_pb2.Capability) -> frozenset[str]:
    """Returns the models of a report whose names come from the lists of servers."""
    return frozenset(instance.model for instance in capability.instances if instance.listed)


def _in_phase(capability: runner_pb2.Capability, *phases: int) -> frozenset[str]:
    return frozenset(instance.model for instance in capability.instances if instance.phase in phases)


def _runtimes(capability: runner_pb2.Capability) -> dict[str, str]:
    return {instance.model: instance.runtime for instance in capability.instances if instance.runtime}
