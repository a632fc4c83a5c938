"""Refusals of requests: messages and figures."""

import math
from dataclasses import replace

from router_svc.policy.decisions import Rejects
from router_svc.policy.endpoints.candidates import Candidate, HostMemory
from router_svc.policy.endpoints.required_capabilities import GateSummary
from router_svc.policy.router_request import Request
from weft.kernel.errors.failover import FailureKind, classify
from weft.kernel.errors.reasons import Reason
from weft.kernel.values import unknown_names
from weft.kernel.values.units import size_words

FULL_RETRY_SECONDS = 5.0
"""Retry-After for a full queue without a better estimate."""
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0


def unknown_target(request: Request) -> Rejects:
    """Return the refusal for an unknown target. Only the edge knows which similar names its caller may see."""
    error = unknown_names.unknown_target(request.spec.model)
    return Rejects(key=request.key, reason=error.reason, message=error.log_message, metadata=error.metadata)


def no_candidate_can(request: Request, summary: GateSummary) -> Rejects:
    """Return the refusal for a target without a candidate for the request."""
    comes_back = summary.reason in (Reason.NO_RUNNER_AVAILABLE, Reason.CLOCK_OFF)
    return Rejects(
        key=request.key,
        reason=summary.reason,
        message=summary.message,
        retry_after_seconds=FULL_RETRY_SECONDS if comes_back else None,
    )


def of_queue(
    request: Request,
    message: str,
    *,
    waiting: int,
    depth: int,
    average_wait_seconds: float | None = None,
    retry_seconds: float = FULL_RETRY_SECONDS,
    reason: Reason = Reason.QUEUE_FULL,
) -> Rejects:
    """Return a refusal with a queue's figures: waiting requests of callers, and how many may wait."""
    metadata = {"queueDepth": str(waiting), "maxDepth": str(depth)}
    if average_wait_seconds is not None:
        metadata["avgWaitMs"] = str(round(average_wait_seconds * 1000))
    seconds = retry_after(retry_seconds)
    return Rejects(key=request.key, reason=reason, message=message, retry_after_seconds=seconds, metadata=metadata)


def deadline_passed(request: Request, *, is_out_of_reach: bool = False) -> Rejects:
    """Return the refusal of a request whose deadline passed while it waited."""
    message = "the request's deadline passed while it waited"
    return Rejects(
        key=request.key,
        reason=Reason.DEADLINE_EXCEEDED,
        message=f"{message}: {_no_runner(request)}" if is_out_of_reach else message,
        retry_after_seconds=FULL_RETRY_SECONDS if is_out_of_reach else None,
    )


def out_of_reach(request: Request, waited_seconds: float) -> Rejects:
    """Return the refusal of a request that waited in vain for the return of a lost runner."""
    return Rejects(
        key=request.key,
        reason=Reason.NO_RUNNER_AVAILABLE,
        message=f"{_no_runner(request)} now; the request waited {round(waited_seconds, 1):g} s for one",
        retry_after_seconds=FULL_RETRY_SECONDS,
    )


def _no_runner(request: Request) -> str:
    return f"no runner that serves {request.spec.model} can be reached"


def deadline_unreachable(request: Request, parts: tuple[tuple[str, float], ...], left_seconds: float) -> Rejects:
    """Return the refusal of a request that would end after its deadline. `parts`: its expected duration."""
    total = sum(seconds for _, seconds in parts)
    named = ", ".join(f"{seconds:.1f} s {what}" for what, seconds in parts if seconds >= 0.05)
    return Rejects(
        key=request.key,
        reason=Reason.DEADLINE_UNREACHABLE,
        message=f"it would take about {total:.1f} s ({named}), and its deadline is in {max(0.0, left_seconds):.1f} s",
        retry_after_seconds=retry_after(total - left_seconds),
        metadata={"estimate_seconds": f"{total:.1f}"},
    )


def first_token_too_late(request: Request, expected_seconds: float | None, most_seconds: float) -> Rejects:
    """Return the refusal of a request whose first token is expected after its caller's limit; None: unknown."""
    if expected_seconds is None:
        expected = "when its first token comes is unknown"
    else:
        expected = f"its first token is expected within {expected_seconds:.1f} s"
    return Rejects(
        key=request.key,
        reason=Reason.DEADLINE_UNREACHABLE,
        message=f"{expected}, and the request may wait at most {most_seconds:g} s",
        retry_after_seconds=retry_after(FULL_RETRY_SECONDS if expected_seconds is None else expected_seconds),
        metadata={} if expected_seconds is None else {"estimate_seconds": f"{expected_seconds:.1f}"},
    )


def not_loaded(refusal: Rejects, request: Request, waited_seconds: float, awaited: str) -> Rejects:
    """Return the refusal of a timed-out request without a loaded model; `awaited`: what blocked the load."""
    return replace(
        refusal,
        message=f"{request.spec.model} was not loaded in {round(waited_seconds, 1):g} s; it waited for {awaited}",
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
    """Return the refusal after the last failed attempt."""
    is_final = classify(reason) is FailureKind.FINAL
    why = "another runner would fail as well" if is_final else "no other runner may serve it now"
    return Rejects(key=key, reason=reason, message=f"attempt {attempt} failed and is not retried: {why}")


def retry_after(seconds: float) -> float:
    """Return the time after which a caller may retry, as a bounded number of whole seconds."""
    return float(math.ceil(max(MIN_RETRY_SECONDS, min(MAX_RETRY_SECONDS, seconds))))
