"""What those who wait are told."""

from collections.abc import Sequence

from router_svc.policy.candidates import Candidate
from router_svc.policy.decisions import Loads, Waits
from router_svc.policy.queue import Arrival
from router_svc.policy.wakes import WakeStatus


def waits_for_slot(arrival: Arrival, position: int, ready: Sequence[Candidate]) -> Waits:
    """All candidates that take requests are full."""
    slots = sum(min(c.slots, c.runner_max_requests or c.slots) for c in ready)
    return Waits(key=arrival.key, position=position, reason=f"all {slots} slots of {arrival.target} are busy")


def waits_for_load(arrival: Arrival, loading: Sequence[Candidate]) -> Loads:
    """None takes requests yet, and some load."""
    progress = max((c.load_progress for c in loading if c.load_progress is not None), default=None)
    return Loads(key=arrival.key, stage=f"{loading[0].model} loads on {loading[0].runner}", progress=progress)


def waits_for_wake(arrival: Arrival, candidate: Candidate, status: WakeStatus) -> Loads:
    """None takes requests or loads, and one is being woken."""
    where = f" on {candidate.runner}" if candidate.runner else ""
    elapsed = min(status.elapsed_seconds, status.max_wait_seconds)
    return Loads(
        key=arrival.key,
        stage=f"waking {candidate.model}{where} ({elapsed:.0f} s of at most {status.max_wait_seconds:.0f} s)",
        progress=candidate.load_progress if status.progress is None else status.progress,
        eta_seconds=status.eta_seconds,
    )
