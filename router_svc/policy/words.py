"""What those who wait are told."""

import math
from collections.abc import Sequence

from router_svc.policy.arrival import Arrival
from router_svc.policy.candidates import Candidate
from router_svc.policy.choice import Considered
from router_svc.policy.decisions import Loads, Waits
from router_svc.policy.load_plan import GateWord
from router_svc.policy.wakes import WakeStatus


def waits_for_slot(arrival: Arrival, position: int, slots: int, eta_seconds: float | None) -> Waits:
    """All candidates that take requests are full."""
    return _waits(arrival, position, f"all {slots} slots of {arrival.target} are busy", eta_seconds)


def waits_for_own(arrival: Arrival, position: int, running: int, most: int) -> Waits:
    """Its tenant has as many requests running as it may."""
    return _waits(arrival, position, f"tenant {arrival.tenant} has {running} of {most} requests running", None)


def waits_for_pool(arrival: Arrival, position: int, pool: str, most: int, eta_seconds: float | None) -> Waits:
    """Its pool has as many requests running as it may."""
    return _waits(arrival, position, f"pool {pool} has {most} of {most} requests running", eta_seconds)


def waits_for_room(arrival: Arrival, position: int, gate: GateWord) -> Waits:
    """A model cannot be loaded yet."""
    return _waits(arrival, position, gate.reason, gate.eta_seconds)


def waits_for_turn(arrival: Arrival, position: int, model: str) -> Waits:
    """What could serve it gives way to another model."""
    return _waits(arrival, position, f"{model} gives way to another model for a turn", None)


def waits_for_decision(arrival: Arrival, position: int) -> Waits:
    """Nothing that could serve it is loaded, and nothing was decided about that yet."""
    return _waits(arrival, position, f"no model of {arrival.target} is loaded", None)


def waits_for_load(arrival: Arrival, loading: Sequence[Candidate]) -> Loads:
    """None takes requests yet, and some load."""
    progress = max((c.load_progress for c in loading if c.load_progress is not None), default=None)
    eta = min((c.load_eta_seconds for c in loading if c.load_eta_seconds is not None), default=None)
    where = f"{loading[0].model} loads on {loading[0].runner}"
    return Loads(key=arrival.key, stage=where, progress=progress, eta_seconds=_whole(eta))


def waits_for_wake(arrival: Arrival, candidate: Candidate, status: WakeStatus) -> Loads:
    """None takes requests or loads, and one is being woken."""
    where = f" on {candidate.runner}" if candidate.runner else ""
    elapsed = min(status.elapsed_seconds, status.max_wait_seconds)
    return Loads(
        key=arrival.key,
        stage=f"waking {candidate.model}{where} ({elapsed:.0f} s of at most {status.max_wait_seconds:.0f} s)",
        progress=candidate.load_progress if status.progress is None else status.progress,
        eta_seconds=_whole(status.eta_seconds),
    )


def with_considered(word: Waits, considered: tuple[Considered, ...]) -> Waits:
    """The same word and who could serve the request."""
    return Waits(
        key=word.key,
        position=word.position,
        reason=word.reason,
        eta_seconds=word.eta_seconds,
        considered=considered,
    )


def _waits(arrival: Arrival, position: int, reason: str, eta_seconds: float | None) -> Waits:
    return Waits(key=arrival.key, position=position, reason=reason, eta_seconds=_whole(eta_seconds))


def _whole(seconds: float | None) -> float | None:
    """Whole seconds, so that an estimate that is hardly another one is not told anew."""
    return None if seconds is None else float(math.ceil(seconds))
