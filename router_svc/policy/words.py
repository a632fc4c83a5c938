"""What those who wait are told."""

import math
from collections.abc import Sequence

from router_svc.policy.arrival import Arrival
from router_svc.policy.candidates import Candidate
from router_svc.policy.decisions import Loads, Waits
from router_svc.policy.wakes import WakeStatus

MAX_UNWELL_NAMED = 3
"""Replicas whose trouble is told by name."""


def slots_are_busy(target: str, slots: int) -> str:
    """All candidates that take requests are full."""
    return f"all {slots} slots of {target} are busy"


def nobody_is_free(target: str, busy: int, unwell: Sequence[tuple[str, str]]) -> str:
    """Some candidates that take requests have free slots and get none. `unwell`: their models, and why.

    `busy`: how many others have no free slot.
    """
    named = [f"{model} ({why})" for model, why in unwell[:MAX_UNWELL_NAMED]]
    if len(unwell) > MAX_UNWELL_NAMED:
        named.append(f"and {len(unwell) - MAX_UNWELL_NAMED} more")
    full = [f"{busy} of {busy + len(unwell)} replicas have no free slot"] if busy else []
    return f"{target} takes no request now: {', '.join([*full, *named])}"


def tenant_is_full(tenant: str, running: int, most: int) -> str:
    """A tenant has as many requests running as it may."""
    return f"tenant {tenant} has {running} of {most} requests running"


def pool_is_full(pool: str, most: int) -> str:
    """A pool has as many requests running as it may."""
    return f"pool {pool} has {most} of {most} requests running"


def gives_way(model: str) -> str:
    """What could serve it gives way to another model."""
    return f"{model} gives way to another model for a turn"


def nothing_is_loaded(target: str) -> str:
    """Nothing that could serve it is loaded, and nothing was decided about that yet."""
    return f"no model of {target} is loaded"


def waits_for_load(arrival: Arrival, loading: Sequence[Candidate]) -> Loads:
    """None takes requests yet, and some load."""
    progress = max((c.load_progress for c in loading if c.load_progress is not None), default=None)
    eta = min((c.load_eta_seconds for c in loading if c.load_eta_seconds is not None), default=None)
    where = f"{loading[0].model} loads on {loading[0].runner}"
    return Loads(key=arrival.key, stage=where, progress=progress, eta_seconds=whole(eta))


def waits_for_wake(arrival: Arrival, candidate: Candidate, status: WakeStatus) -> Loads:
    """None takes requests or loads, and one is being woken."""
    where = f" on {candidate.runner}" if candidate.runner else ""
    elapsed = min(status.elapsed_seconds, status.max_wait_seconds)
    return Loads(
        key=arrival.key,
        stage=f"waking {candidate.model}{where} ({elapsed:.0f} s of at most {status.max_wait_seconds:.0f} s)",
        progress=candidate.load_progress if status.progress is None else status.progress,
        eta_seconds=whole(status.eta_seconds),
    )


def says_the_same(word: Waits | Loads, earlier: Waits | Loads | None) -> bool:
    """Whether a request knows this already; who could serve it is told once, and not compared."""
    if isinstance(word, Waits) and isinstance(earlier, Waits):
        return (word.position, word.reason, word.eta_seconds) == (earlier.position, earlier.reason, earlier.eta_seconds)
    return word == earlier


def whole(seconds: float | None) -> float | None:
    """Whole seconds, so that an estimate that is hardly another one is not told anew."""
    return None if seconds is None else float(math.ceil(round(seconds, 3)))
