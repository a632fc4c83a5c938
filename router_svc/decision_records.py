"""Decisions about requests, as messages."""

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from router_svc.policy.decisions import Loads, Placed, Rejects, Waits
from router_svc.policy.endpoints.choice import MAX_CONSIDERED, Considered
from router_svc.request_entry import LoadStart, Noted, Retry
from weft.api.router.v1 import request_pb2 as pb
from weft.kernel.reasons import Reason

_NANOSECONDS = 1e9


def add_decisions(record: pb.RequestRecord, decisions: Sequence[tuple[float, Noted]], arrived_at: float) -> None:
    """What was noted, each with when, on the clock of `arrived_at`."""
    for at, noted in decisions:
        _fill_decision(record.decisions.add(), noted, at - arrived_at)


def set_seconds(duration: Duration, seconds: float) -> None:
    """So long; a fraction of a nanosecond is lost."""
    duration.FromNanoseconds(int(seconds * _NANOSECONDS))


def _fill_decision(record: pb.DecisionRecord, noted: Noted, age_seconds: float) -> None:
    set_seconds(record.age, max(0.0, age_seconds))
    match noted:
        case Waits():
            record.kind = pb.DecisionRecord.KIND_QUEUED
            record.detail = f"{noted.reason} (position {noted.position}{_eta(noted.eta_seconds)})"
            _fill_candidates(record, noted.considered, len(noted.considered))
        case Loads():
            record.kind = pb.DecisionRecord.KIND_LOADING
            record.detail = f"{noted.stage}{_eta(noted.eta_seconds)}"
        case LoadStart():
            record.kind = pb.DecisionRecord.KIND_LOAD_STARTED
            wakes = noted.wakes
            where = f" on {wakes.runner}" if wakes.runner else ""
            record.detail = f"{wakes.model}{where} is loaded{f': {wakes.why}' if wakes.why else ''}"
        case Placed():
            record.kind = pb.DecisionRecord.KIND_PLACED
            record.detail = f"attempt {noted.attempt} goes to {noted.candidate.model} on {noted.candidate.runner}"
            if noted.choice is not None:
                record.policy = noted.choice.policy
                _fill_candidates(record, noted.choice.considered, noted.choice.count)
        case Retry():
            record.kind = pb.DecisionRecord.KIND_RETRIED
            record.detail = f"attempt {noted.attempt} failed before any content: {_word(noted.reason)}"
        case Rejects():
            record.kind = pb.DecisionRecord.KIND_REJECTED
            record.detail = f"{_word(noted.reason)}: {noted.message}"


def _fill_candidates(record: pb.DecisionRecord, considered: tuple[Considered, ...], count: int) -> None:
    record.candidate_count = count
    for candidate in considered[:MAX_CONSIDERED]:
        record.candidates.add(
            model=candidate.model,
            runner=candidate.runner,
            score=candidate.score,
            gate=candidate.gate,
            chosen=candidate.chosen,
        )


def _eta(seconds: float | None) -> str:
    return "" if seconds is None else f", about {seconds:.0f} s"


def _word(reason: Reason) -> str:
    return reason.name.lower()
