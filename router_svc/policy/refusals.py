"""Why a request can never be placed as the mesh is now."""

from collections.abc import Sequence

from router_svc.policy.candidates import Candidate, Fleet
from router_svc.policy.decisions import Rejects
from router_svc.policy.queue import Arrival
from weft.kernel.reasons import Reason


def target_refusal(arrival: Arrival, fleet: Fleet) -> Rejects | None:
    """A refusal for what the request asks for, however its members are; None when somebody could serve it."""
    members = fleet.members(arrival.target)
    if not members:
        return Rejects(
            key=arrival.key,
            reason=Reason.MODEL_NOT_FOUND,
            message=f"no model or pool is called {arrival.target}; there is: {fleet.some_names()}",
        )
    able = [candidate for candidate in members if arrival.operation in candidate.operations]
    if not able:
        return Rejects(
            key=arrival.key,
            reason=Reason.UNSUPPORTED_OPERATION,
            message=f"{arrival.target} does not offer {arrival.operation.name.lower()}",
        )
    if not permitted(arrival, fleet):
        return Rejects(
            key=arrival.key,
            reason=Reason.PERMISSION_DENIED,
            message=f"{arrival.target} runs off the premises, and the request does not allow that",
        )
    return None


def permitted(arrival: Arrival, fleet: Fleet) -> list[Candidate]:
    """The members that offer the operation and where the request may run, up or not."""
    return [
        candidate
        for candidate in fleet.members(arrival.target)
        if arrival.operation in candidate.operations and (arrival.allow_remote or not candidate.remote)
    ]


def none_is_up(arrival: Arrival, members: Sequence[Candidate], retry_after_seconds: float) -> Rejects:
    """No member that could serve it is up."""
    details = "; ".join(
        sorted({f"{member.runner or member.model}: {member.detail}" for member in members if member.detail})
    )
    return Rejects(
        key=arrival.key,
        reason=Reason.NO_RUNNER_AVAILABLE,
        message=f"no runner that serves {arrival.target} is up{f' ({details})' if details else ''}",
        retry_after_seconds=retry_after_seconds,
    )


def queue_full(arrival: Arrival, depth: int, retry_after_seconds: float) -> Rejects:
    """As many wait as may."""
    return Rejects(
        key=arrival.key,
        reason=Reason.QUEUE_FULL,
        message=f"the queue for {arrival.target} is full ({depth} requests wait)",
        retry_after_seconds=retry_after_seconds,
    )


def deadline_passed(arrival: Arrival) -> Rejects:
    """Its own deadline came before its turn."""
    return Rejects(
        key=arrival.key,
        reason=Reason.DEADLINE_EXCEEDED,
        message="the request's deadline passed while it waited",
    )


def waited_too_long(arrival: Arrival, waited_seconds: float, retry_after_seconds: float) -> Rejects:
    """The queue timeout came before its turn."""
    return Rejects(
        key=arrival.key,
        reason=Reason.QUEUE_TIMEOUT,
        message=f"no slot for {arrival.target} came free in {round(waited_seconds, 1):g} s",
        retry_after_seconds=retry_after_seconds,
    )


def wake_failed(arrival: Arrival, model: str, error: str) -> Rejects:
    """The wake that it waited for failed."""
    return Rejects(key=arrival.key, reason=Reason.WAKE_FAILED, message=f"{model} could not be woken: {error}")
