"""Health of a process by component: a pure policy from observations and `now` to states.

`health_monitor` runs the checks. A component changes its state only after its observations have differed for a while
(`HealthLimits`), so that intermittent faults do not make it flap.
"""

from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any


class HealthState(StrEnum):
    """State of one component."""

    OK = "ok"
    DEGRADED = "degraded"
    """It works, but with reduced function or stale data."""
    STARTING = "starting"
    """It has not worked yet since the process started."""
    DOWN = "down"
    """Its dependents cannot work."""


_SEVERITY = {HealthState.OK: 0, HealthState.DEGRADED: 1, HealthState.STARTING: 2, HealthState.DOWN: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The result of one check of a component."""

    state: HealthState
    reason: str = ""
    """A fixed word, such as `no_router`; empty if it is healthy."""
    message: str = ""
    """One sentence for operators: never a secret, an address or request content."""


WELL = Observation(state=HealthState.OK)


def degraded(reason: str, message: str) -> Observation:
    """Returns the observation of a degraded component."""
    return Observation(state=HealthState.DEGRADED, reason=reason, message=message)


def down(reason: str, message: str) -> Observation:
    """Returns the observation of a component that is down."""
    return Observation(state=HealthState.DOWN, reason=reason, message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """When the health of a component changes."""

    worse_after_checks: int = 3
    """Number of consecutive checks, one per second, after which a worse state is reported."""
    worse_after_seconds: float = 2.0
    """Minimum time between the first and the last of them."""
    better_after_checks: int = 3
    """Number of consecutive checks after which a better state is reported."""
    better_after_seconds: float = 10.0
    """Minimum time between the first and the last of them; none for a component that has not been healthy yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """The reported state of one component."""

    name: str
    state: HealthState = HealthState.STARTING
    reason: str = "starting"
    message: str = "it has not been checked yet"
    since: float
    """When it entered this state, on the monotonic clock."""
    was_healthy: bool = False
    """Whether it has been healthy since the process started."""
    pending_checks: int = 0
    """Consecutive observations that differ from the state in the same direction."""
    pending_since: float = 0.0
    pending_is_worse: bool = False


def next_component(held: Component, seen: Observation, now: float, limits: HealthLimits) -> Component:
    """Returns a component after one more observation at `now`."""
    now_seen, was = _SEVERITY[seen.state], _SEVERITY[held.state]
    if held.state is HealthState.STARTING and seen.state is not HealthState.DOWN:
        return _changed(held, seen, now)
    if seen.state is HealthState.OK and not held.was_healthy:
        return _changed(held, seen, now)
    if now_seen == was and held.state is not HealthState.STARTING:
        return replace(held, reason=seen.reason, message=seen.message, pending_checks=0)
    is_worse = now_seen >= was
    goes_on = held.pending_checks > 0 and held.pending_is_worse == is_worse
    since = held.pending_since if goes_on else now
    checks = held.pending_checks + 1 if goes_on else 1
    most_checks, seconds = (
        (limits.worse_after_checks, limits.worse_after_seconds)
        if is_worse
        else (limits.better_after_checks, limits.better_after_seconds)
    )
    if checks >= most_checks and now - since >= seconds:
        return _changed(held, seen, now)
    pending = replace(held, pending_checks=checks, pending_since=since, pending_is_worse=is_worse)
    # While it starts, operators see immediately what it waits for; only the state is delayed.
    return replace(pending, reason=seen.reason, message=seen.message) if held.state is HealthState.STARTING else pending


def _changed(held: Component, seen: Observation, now: float) -> Component:
    return Component(
        name=held.name,
        state=seen.state,
        reason=seen.reason,
        message=seen.message,
        since=now,
        was_healthy=held.was_healthy or seen.state is HealthState.OK,
    )


HealthProbe = Callable[[], Observation | Coroutine[Any, Any, Observation]]
"""Returns what it sees immediately, or a coroutine that has to wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """A check of one component."""

    name: str
    probe: HealthProbe
    is_essential: bool = True
    """Whether the process is not ready while the component is down; otherwise it is only degraded."""
    services: Collection[str] = field(default=())
    """Full names of the gRPC services that do not serve while it is down; an essential check stops all of them."""
    is_immediate: bool = False
    """Whether it also looks at each query of the health, so that a fault counts immediately, also after a freeze."""


EVENT_LOOP = "event_loop"
"""The component that decides liveness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """The health of one process."""

    components: tuple[Component, ...] = ()
    essential: frozenset[str] = frozenset()
    """Names of the components that it needs to be ready."""
    stopped_services: frozenset[str] = frozenset()
    """gRPC services that do not serve although the process is ready."""
    is_stopping: bool = False

    @property
    def is_live(self) -> bool:
        """Whether the process itself works, regardless of other processes, databases and engines."""
        return not any(each.name == EVENT_LOOP and each.state is HealthState.DOWN for each in self.components)

    @property
    def is_ready(self) -> bool:
        """Whether the process is ready for requests."""
        return not self.is_stopping and not any(
            each.name in self.essential and _SEVERITY[each.state] >= _SEVERITY[HealthState.DOWN]
            for each in self.components
        )

    @property
    def status(self) -> str:
        """`ok`, `degraded`, `starting`, `not_ready` or `stopping`."""
        if self.is_stopping:
            return "stopping"
        if self.is_ready:
            return "ok" if all(each.state is HealthState.OK for each in self.components) else "degraded"
        missing = [each for each in self.components if each.name in self.essential]
        return "not_ready" if any(each.state is HealthState.DOWN for each in missing) else "starting"

    def serves(self, service: str) -> bool:
        """Whether a gRPC service, by its full name, can do its work."""
        return self.is_ready and service not in self.stopped_services


class HealthSource:
    """Source of a process's health. The base class has no components and is healthy."""

    @property
    def report(self) -> HealthReport:
        """The health as of the last checks, and of immediate checks now."""
        return HealthReport()

    def component_documents(self) -> list[dict[str, Any]]:
        """Returns the components as JSON: see `component_document`."""
        return []


LIVEZ, READYZ, HEALTH = "/livez", "/readyz", "/health"


def probe_answer(path: str, health: HealthSource) -> tuple[bool, dict[str, Any]]:
    """Returns whether a probe succeeds, and its JSON: all components for HEALTH, only the status for the others."""
    report = health.report
    if path == LIVEZ:
        return report.is_live, {"status": "ok" if report.is_live else "stuck"}
    if path == READYZ:
        return report.is_ready, {"status": report.status}
    document = {"status": report.status, "live": report.is_live, "ready": report.is_ready}
    return report.is_ready, document | {"components": health.component_documents()}


def component_document(component: Component, now: float, utc_now: datetime) -> dict[str, Any]:
    """Returns a component as JSON; `since` is when it entered its state."""
    since = utc_now - timedelta(seconds=max(0.0, now - component.since))
    return {
        "name": component.name,
        "state": component.state.value,
        "reason": component.reason,
        "message": component.message,
        "since": since.isoformat(timespec="seconds").replace("+00:00", "Z"),
    }
