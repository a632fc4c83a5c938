"""Refusals of requests: messages and figures."""

import math
from dataclasses import replace

from router_svc.policy.arrival import Arrival
from router_svc.policy.decisions import Rejects
from router_svc.policy.endpoints.candidates import Candidate, HostMemory
from router_svc.policy.endpoints.capability import GateSummary
from router_svc.policy.limits import SchedulerLimits
from weft.kernel.reasons import Reason
from weft.kernel.units import size_words

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0


def unknown_target(arrival: Arrival, some_names: str) -> Rejects:
    """Return the refusal for an unknown target."""
    return Rejects(
        key=arrival.key,
        reason=Reason.MODEL_NOT_FOUND,
        message=f"no model, pool or route is called {arrival.target}; there is: {some_names}",
    )


def no_candidate_can(arrival: Arrival, summary: GateSummary, retry_after_seconds: float) -> Rejects:
    """Return the refusal for a target without a candidate for the request."""
    comes_back = summary.reason in (Reason.NO_RUNNER_AVAILABLE, Reason.CLOCK_OFF)
    return Rejects(
        key=arrival.key,
        reason=summary.reason,
        message=summary.message,
        retry_after_seconds=retry_after_seconds if comes_back else None,
    )


def queue_full(
    arrival: Arrival, waiting: int, depth: int, average_wait_seconds: float | None, retry_after_seconds: float
) -> Rejects:
    """Return the refusal for a full queue."""
    return Rejects(
        key=arrival.key,
        reason=Reason.QUEUE_FULL,
        message=f"the queue for {arrival.target} is full ({waiting} requests wait)",
        retry_after_seconds=retry_after_seconds,
        metadata=_queue_figures(waiting, depth, average_wait_seconds),
    )


def too_slow(
    arrival: Arrival,
    expected_seconds: float,
    waiting: int,
    depth: int,
    average_wait_seconds: float | None,
    retry_after_seconds: float,
) -> Rejects:
    """Return the refusal for a queue with free places whose expected wait exceeds the queue timeout."""
    return Rejects(
        key=arrival.key,
        reason=Reason.QUEUE_FULL,
        message=f"the queue for {arrival.target} is too long: its turn would come in about {expected_seconds:.0f} s",
        retry_after_seconds=retry_after_seconds,
        metadata=_queue_figures(waiting, depth, average_wait_seconds),
    )


def was_evicted(
    arrival: Arrival, waiting: int, depth: int, average_wait_seconds: float | None, retry_after_seconds: float
) -> Rejects:
    """Return the refusal of a waiting request that was evicted for one of a higher class or of a less served tenant."""
    return Rejects(
        key=arrival.key,
        reason=Reason.QUEUE_FULL,
        message=(
            f"the queue for {arrival.target} is full; this request was evicted for one of a higher priority class, or "
            "of a tenant that was served less"
        ),
        retry_after_seconds=retry_after_seconds,
        metadata=_queue_figures(waiting, depth, average_wait_seconds),
    )


def too_many_durable(arrival: Arrival, waiting: int, limits: SchedulerLimits) -> Rejects:
    """Return the refusal for too many waiting durable requests over all queues."""
    return Rejects(
        key=arrival.key,
        reason=Reason.QUEUE_FULL,
        message=f"{waiting} durable requests wait, which is the limit (router.scheduling.max_durable_waiting)",
        retry_after_seconds=limits.full_retry_seconds,
        metadata=_queue_figures(waiting, limits.max_durable_waiting, None),
    )


def deadline_passed(arrival: Arrival) -> Rejects:
    """Return the refusal of a request whose deadline passed while it waited."""
    return Rejects(
        key=arrival.key,
        reason=Reason.DEADLINE_EXCEEDED,
        message="the request's deadline passed while it waited",
    )


def deadline_unreachable(arrival: Arrival, parts: tuple[tuple[str, float], ...], left_seconds: float) -> Rejects:
    """Return the refusal of a request that would end after its deadline. `parts`: its expected duration."""
    total = sum(seconds for _, seconds in parts)
    named = ", ".join(f"{seconds:.1f} s {what}" for what, seconds in parts if seconds >= 0.05)
    return Rejects(
        key=arrival.key,
        reason=Reason.DEADLINE_UNREACHABLE,
        message=f"it would take about {total:.1f} s ({named}), and its deadline is in {max(0.0, left_seconds):.1f} s",
        retry_after_seconds=retry_after(total - left_seconds),
        metadata={"estimate_seconds": f"{total:.1f}"},
    )


def waited_too_long(
    arrival: Arrival,
    waited_seconds: float,
    waiting: int,
    depth: int,
    average_wait_seconds: float | None,
    retry_after_seconds: float,
) -> Rejects:
    """Return the refusal of a request that waited for the queue timeout."""
    return Rejects(
        key=arrival.key,
        reason=Reason.QUEUE_TIMEOUT,
        message=f"no slot for {arrival.target} came free in {round(waited_seconds, 1):g} s",
        retry_after_seconds=retry_after_seconds,
        metadata=_queue_figures(waiting, depth, average_wait_seconds),
    )


def not_loaded(refusal: Rejects, arrival: Arrival, waited_seconds: float, awaited: str) -> Rejects:
    """Return the refusal of a timed-out request for which no model was loaded; `awaited`: what blocked the load."""
    return replace(
        refusal, message=f"{arrival.target} was not loaded in {round(waited_seconds, 1):g} s; it waited for {awaited}"
    )


def wake_failed(key: int, model: str, error: str) -> Rejects:
    """Return the refusal after a failed wake."""
    return Rejects(key=key, reason=Reason.WAKE_FAILED, message=f"{model} could not be woken: {error}")


def never_fits(key: int, candidate: Candidate, memory: HostMemory) -> Rejects:
    """Return the refusal for a model that needs more memory than its host has in total."""
    needed, most = candidate.memory_bytes, memory.total_bytes
    return Rejects(
        key=key,
        reason=Reason.INSUFFICIENT_MEMORY,
        message=(
            f"{candidate.model} needs {size_words(needed)}, and {memory.host} has {size_words(most)} in all; "
            "use a smaller model or a shorter context"
        ),
        metadata={"host": memory.host, "needed_bytes": str(needed), "most_bytes": str(most)},
    )


def attempt_failed(key: int, attempt: int, reason: Reason) -> Rejects:
    """Return the refusal after a last failed attempt."""
    return Rejects(key=key, reason=reason, message=f"attempt {attempt} failed and is not repeated")


def retry_after(seconds: float) -> float:
    """Return the time after which a caller may retry, in whole seconds within the bounds."""
    return float(math.ceil(max(MIN_RETRY_SECONDS, min(MAX_RETRY_SECONDS, seconds))))


def _queue_figures(waiting: int, depth: int, average_wait_seconds: float | None) -> dict[str, str]:
    figures = {"queueDepth": str(waiting), "maxDepth": str(depth)}
    if average_wait_seconds is not None:
        figures["avgWaitMs"] = str(round(average_wait_seconds * 1000))
    return figures
