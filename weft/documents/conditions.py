"""Conditions of resources: whether each holds and why, computed from the resource's message."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Literal

from weft.api.registry.v1.agent_pb2 import Agent
from weft.api.registry.v1.model_pb2 import Model
from weft.api.registry.v1.pool_pb2 import Pool
from weft.api.registry.v1.route_pb2 import Route
from weft.api.registry.v1.runner_pb2 import InstanceState, Runner
from weft.documents.left_out import left_out_items
from weft.kernel.errors.reasons import MODEL_NOT_LISTED
from weft.kernel.time.clock import offset_words, refused_words
from weft.kernel.time.timestamps import optional_datetime, seconds_of

READY = "Ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition, such as Ready, whether it holds, and why."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    """CamelCase word for programs, such as "CrashLoop"."""
    message: str
    """Explanation for people."""


_ASLEEP = "it hibernates and is woken by the next request"
_NOT_READY: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        InstanceState.PHASE_IDLE: ("NotLoaded", "its engine is not running; the next request starts it"),
        InstanceState.PHASE_LOADING: ("Loading", "its engine loads"),
        InstanceState.PHASE_DRAINING: ("Draining", "it is draining: it accepts no new requests"),
        InstanceState.PHASE_STOPPING: ("Stopping", "its engine is being ended"),
        InstanceState.PHASE_CRASH_LOOP: (
            "CrashLoop",
            "its engine crashed repeatedly and waits before the next start",
        ),
        InstanceState.PHASE_FAILED: ("Failed", "its engine cannot be started"),
        InstanceState.PHASE_HIBERNATING: ("Hibernating", _ASLEEP),
    }
)
"""Reason and message of a model that is not ready, by the phase of its instance."""
UNUSABLE = frozenset({InstanceState.PHASE_CRASH_LOOP, InstanceState.PHASE_FAILED})
"""Phases of a model that its runner cannot serve."""


def model_conditions(model: Model, instance: InstanceState | None) -> tuple[Condition, ...]:
    """Returns HasRunner, Awake and Ready of a model; `instance`: its state on its runner, None: unknown."""
    return _has_runner(model), _awake(model), _model_ready(model, instance)


def agent_conditions(agent: Agent) -> tuple[Condition, ...]:
    """Returns Target and Ready of an agent."""
    manifest = agent.manifest
    target = f"{manifest.WhichOneof('target') or 'model'}/{manifest.model or manifest.pool}"
    inactive_since = optional_datetime(agent, "inactive_time")
    if inactive_since is not None:
        gone = f"its runner {agent.runner} is gone since {_time(inactive_since)}"
        unknown = Condition(type="Target", status="Unknown", reason="RunnerGone", message=gone)
        return unknown, _holds(READY, False, "RunnerGone", gone)
    if agent.status == Agent.STATUS_ACTIVE:
        return (
            _holds("Target", True, "Active", f"{target} is active"),
            _holds(READY, True, "Active", f"{target} takes requests"),
        )
    if agent.status == Agent.STATUS_HIBERNATING:
        asleep = f"{target} hibernates and is woken by the next request"
        return _holds("Target", True, "Hibernating", asleep), _holds(READY, False, "Hibernating", asleep)
    missing = f"{target} has no member that can answer"
    return _holds("Target", False, "Inactive", missing), _holds(READY, False, "TargetInactive", missing)


def runner_conditions(runner: Runner) -> tuple[Condition, ...]:
    """Returns Connected and Ready of a runner, and Served if it serves only some of a server's models."""
    if runner.status != Runner.STATUS_ACTIVE:
        inactive_since = optional_datetime(runner, "inactive_time")
        since = f" since {_time(inactive_since)}" if inactive_since is not None else ""
        gone = f"it is offline{since}"
        return _holds("Connected", False, "Gone", gone), _holds(READY, False, "Gone", gone)
    connected = _holds("Connected", True, "Heartbeats", "its heartbeats arrive")
    if runner.capability.draining:
        return connected, _holds(READY, False, "Draining", "it is draining: it accepts no new requests")
    offset = seconds_of(runner.capability.clock_offset)
    if runner.capability.clock_refused:
        return connected, _holds(READY, False, "ClockOff", refused_words(offset))
    instances = runner.capability.instances
    if instances and all(instance.phase in UNUSABLE for instance in instances):
        return connected, _holds(READY, False, "NoUsableModel", _unusable(instances))
    but = f"; {offset_words(offset)}" if offset else ""
    ready = _holds(READY, True, "TakesRequests", f"it takes requests{but}")
    left_out = left_out_words(runner)
    return (connected, ready, _holds("Served", False, "ModelsLeftOut", left_out)) if left_out else (connected, ready)


def left_out_words(runner: Runner) -> str:
    """Returns what of a runner is left out, and why or how to change that; empty: nothing is."""
    counts = ", ".join(
        f"{server.served_count} of {server.listed_count} models of server {server.name}"
        for server in runner.capability.followed_servers
        if server.served_count + server.left_out_count < server.listed_count
    )
    limit = f"runner {runner.name} serves {counts}; raise its max_listed_models in weft.yaml" if counts else ""
    items = left_out_items(runner.capability.left_out)
    return "; ".join(filter(None, [limit, items and f"runner {runner.name} leaves out {items}"]))


def _unusable(instances: Sequence[InstanceState]) -> str:
    """Returns why a runner has no usable model: the reason of the first one."""
    first = instances[0]
    if len(instances) == 1:
        return f"{first.model} cannot be used" + (f": {first.detail}" if first.detail else "")
    why = f"; {first.model}: {first.detail}" if first.detail else ""
    return f"none of its {len(instances)} models can be used{why}"


def pool_conditions(pool: Pool) -> tuple[Condition, ...]:
    """Returns Ready of a pool."""
    if pool.active_count:
        return (_holds(READY, True, "Active", f"{pool.active_count} of {pool.size} members are active"),)
    if any(member.status == Model.STATUS_HIBERNATING for member in pool.members):
        return (_holds(READY, False, "Hibernating", "its members hibernate; the next request wakes one"),)
    failed = sorted(member.manifest.name for member in pool.members if member.status == Model.STATUS_FAILED)
    if failed:
        return (_holds(READY, False, "Failed", f"none of {pool.size} members is active; failed: {', '.join(failed)}"),)
    return (_holds(READY, False, "NoActiveMember", f"none of {pool.size} members is active"),)


def route_conditions(route: Route) -> tuple[Condition, ...]:
    """Returns Ready of a route."""
    if route.status == Route.STATUS_ACTIVE:
        return (_holds(READY, True, "Active", "a candidate is active"),)
    if route.status == Route.STATUS_HIBERNATING:
        asleep = "no candidate is active, and one hibernates; the next request wakes it"
        return (_holds(READY, False, "Hibernating", asleep),)
    return (_holds(READY, False, "NoActiveCandidate", "no candidate can answer"),)


def _has_runner(model: Model) -> Condition:
    if not model.runner:
        return _holds("HasRunner", False, "NoRunner", "no online runner publishes it")
    if model.HasField("inactive_time") or model.status == Model.STATUS_INACTIVE:
        return _holds("HasRunner", False, "RunnerGone", _gone(model))
    return _holds("HasRunner", True, "Published", f"{model.runner} serves it")


def _awake(model: Model) -> Condition:
    if model.status == Model.STATUS_HIBERNATING:
        return _holds("Awake", False, "Hibernating", _ASLEEP)
    if model.status in (Model.STATUS_ACTIVE, Model.STATUS_FAILED):
        return _holds("Awake", True, "Awake", "it is awake")
    return Condition(type="Awake", status="Unknown", reason="NoRunner", message="no live runner serves it")


def _model_ready(model: Model, instance: InstanceState | None) -> Condition:
    if model.status == Model.STATUS_HIBERNATING:
        return _holds(READY, False, "Hibernating", _ASLEEP)
    if model.status not in (Model.STATUS_ACTIVE, Model.STATUS_FAILED):
        return _holds(READY, False, "RunnerGone" if model.runner else "NoRunner", _gone(model))
    if instance is not None and instance.phase in _NOT_READY:
        if instance.detail.startswith(MODEL_NOT_LISTED):
            return _holds(READY, False, "ModelNotListed", instance.detail)
        reason, message = _NOT_READY[instance.phase]
        return _holds(READY, False, reason, f"{message}: {instance.detail}" if instance.detail else message)
    if model.status == Model.STATUS_FAILED:
        return _holds(READY, False, *_NOT_READY[InstanceState.PHASE_FAILED])
    return _holds(READY, True, "TakesRequests", "it takes requests")


def _gone(model: Model) -> str:
    if not model.runner:
        return "no online runner publishes it"
    inactive_since = optional_datetime(model, "inactive_time")
    since = f" since {_time(inactive_since)}" if inactive_since is not None else ""
    return f"its runner {model.runner} is gone{since}"


def _holds(what: str, holds: bool, reason: str, message: str) -> Condition:
    return Condition(type=what, status="True" if holds else "False", reason=reason, message=message)


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H:%M:%SZ}"
