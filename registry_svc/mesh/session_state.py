"""One session with all that it published, in memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from registry_svc.mesh.domain import Session, Standing
from registry_svc.mesh.overlay import Publisher, watched_runner
from registry_svc.mesh.policy.heartbeat import Holder, Pulse, heard, lost, share_of
from registry_svc.mesh.records import Held, detail_bytes, is_loaded
from registry_svc.mesh.rows import StoredPulse, StoredSession
from weft.api.registry.v1 import agent_pb2, model_pb2, registry_service_pb2, runner_pb2
from weft.documents.conditions import UNUSABLE
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.timestamps import optional_stamp, stamp_of


@dataclass(slots=True, kw_only=True)
class SessionState:
    """One session with its runner, models and agents. Changed only by the mesh and, under its turn, the roster."""

    session: Session
    profile: runner_pb2.Runner
    """The facts of this incarnation, which do not change; see `profile_of`."""
    pulse: Pulse
    last_heartbeat_at: datetime
    inactive_since: datetime | None = None
    capability: Held[runner_pb2.Capability] = field(default_factory=lambda: Held(runner_pb2.Capability()))
    reported: bool = False
    """Whether `capability` is a report of this incarnation; otherwise it is unknown."""
    sequence: int | None = None
    """Newest heartbeat of this incarnation; None before the first one."""
    publications: dict[str, Held[model_pb2.Model]] = field(default_factory=dict)
    agents: dict[str, agent_pb2.Agent] = field(default_factory=dict)
    waking: frozenset[str] = frozenset()
    """Models that hibernated and have not taken requests since: whether they wake is not known yet."""
    unowned: frozenset[str] = frozenset()
    """Models that it has loaded and does not publish any more."""
    saved_pulse: Pulse | None = None
    """The stored liveness; None: not stored."""
    share: float = field(init=False)
    """Its place in a spread of expiries."""
    sleeping: frozenset[str] = field(init=False)
    """Its models that hibernate, by name."""
    failed: frozenset[str] = field(init=False)
    """Its models that it cannot serve, by name."""
    runtimes: Mapping[str, str] = field(init=False)
    """The runtimes of its models that have another one than the runner, by name of the model."""
    detail_bytes: int = field(init=False)
    """Size of the detail texts of its last report."""
    _publisher: Publisher | None = field(init=False, default=None)
    """The present `publisher`, made once for all its models; None: it changed since."""

    def __post_init__(self) -> None:
        self.share = share_of(self.profile.name)
        self._note(self.capability.message())

    def withdraw(self, model: str) -> None:
        """It does not publish this model any more, which may still be loaded."""
        del self.publications[model]
        loaded = any(each.model == model and is_loaded(each) for each in self.capability.message().instances)
        self.unowned |= {model} if loaded else frozenset()

    def report(self, capability: runner_pb2.Capability) -> None:
        """Record a capability report. Called by the mesh, which counts sizes."""
        self.capability = Held(capability)
        self._note(capability)
        self.reported = True
        self._publisher = None

    def _note(self, capability: runner_pb2.Capability) -> None:
        self.sleeping = _in_phase(capability, runner_pb2.InstanceState.PHASE_HIBERNATING)
        self.failed = _in_phase(capability, *UNUSABLE)
        self.runtimes = _runtimes(capability)
        self.detail_bytes = detail_bytes(capability)

    def revive(self, now: float, now_utc: datetime) -> None:
        """Record a heartbeat."""
        self.pulse = heard(now)
        self.last_heartbeat_at = now_utc
        self.inactive_since = None
        self._publisher = None

    def lose(self, standing: Standing, now: float, now_utc: datetime) -> None:
        """Mark the runner as inactive; an inactive one keeps its earlier moment."""
        self.pulse = lost(self.pulse, standing, now)
        self.inactive_since = self.inactive_since or now_utc
        self._publisher = None

    def runner(self) -> registry_service_pb2.WatchedRunner:
        """The runner as the mesh sees it, with its ticket key."""
        return watched_runner(self.publisher(), with_key=True)

    def publisher(self) -> Publisher:
        """The runner as it is now, which later changes leave as it was."""
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
        """Itself, as the session policy sees it."""
        return Holder(session=self.session, live=self.pulse.active)

    def rows(self) -> Iterator[tuple[ResourceKind, str]]:
        """All it published, agents before the models they may point to, the runner last."""
        yield from ((ResourceKind.AGENT, name) for name in self.agents)
        yield from ((ResourceKind.MODEL, name) for name in self.publications)
        yield ResourceKind.RUNNER, self.profile.name

    def stored(self) -> StoredSession:
        """The session and all its rows, for the disk."""
        return StoredSession(
            session=self.session,
            profile=self.profile,
            pulse=self.stored_pulse(),
            publications=tuple(each.message() for each in self.publications.values()),
            agents=tuple(self.agents.values()),
        )

    def stored_pulse(self) -> StoredPulse:
        """Its liveness, for the disk."""
        return StoredPulse(
            runner=self.profile.name,
            standing=self.pulse.standing,
            last_heartbeat_at=self.last_heartbeat_at,
            inactive_since=self.inactive_since,
        )


def _in_phase(capability: runner_pb2.Capability, *phases: int) -> frozenset[str]:
    return frozenset(instance.model for instance in capability.instances if instance.phase in phases)


def _runtimes(capability: runner_pb2.Capability) -> dict[str, str]:
    return {instance.model: instance.runtime for instance in capability.instances if instance.runtime}


def profile_of(runner: runner_pb2.Runner) -> runner_pb2.Runner:
    """Return the facts of one incarnation of a runner, without its report and its state."""
    return runner_pb2.Runner(
        name=runner.name,
        incarnation=runner.incarnation,
        address=runner.address,
        host=runner.host,
        runtime=runner.runtime,
        version=runner.version,
        dial_out=runner.dial_out,
    )
