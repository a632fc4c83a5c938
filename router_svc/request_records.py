"""What the request log holds, as messages. Made only when somebody reads."""

from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from router_svc.policy.choice import MAX_CONSIDERED, Considered
from router_svc.policy.decisions import Loads, Placed, Rejects, Waits
from router_svc.request_log import LoadStart, Noted, RequestEntry, Retry
from weft.api.router.v1 import request_pb2 as pb
from weft.kernel.reasons import Reason

_NANOSECONDS = 1e9


def request_record(entry: RequestEntry, *, with_decisions: bool) -> pb.RequestRecord:
    """One request."""
    record = pb.RequestRecord(
        request_id=entry.request_id,
        tenant=entry.tenant,
        client_id=entry.client_id,
        target=entry.target,
        priority=entry.priority.wire,  # type: ignore[arg-type]  # same numbers
        state=_state(entry),
        reason=entry.reason.value,  # type: ignore[arg-type]  # same numbers
        message=entry.message,
    )
    record.arrive_time.FromDatetime(entry.arrived_wall)
    if entry.ended_at is not None:
        record.end_time.FromDatetime(entry.arrived_wall + timedelta(seconds=entry.ended_at - entry.arrived_at))
    else:
        _fill_wait(record, entry.word)
    if entry.receipt is not None:
        record.receipt.CopyFrom(entry.receipt)
    if with_decisions:
        for at, noted in entry.decisions:
            _fill_decision(record.decisions.add(), noted, at - entry.arrived_at)
    return record


def _state(entry: RequestEntry) -> "pb.RequestRecord.State.ValueType":
    if entry.ended_at is not None:
        return pb.RequestRecord.STATE_ENDED
    match entry.word:
        case Placed():
            return pb.RequestRecord.STATE_RUNNING
        case Loads():
            return pb.RequestRecord.STATE_LOADING
        case _:
            return pb.RequestRecord.STATE_QUEUED


def _fill_wait(record: pb.RequestRecord, word: object) -> None:
    match word:
        case Waits():
            record.queued.position = word.position
            record.queued.reason = word.reason
            if word.eta_seconds is not None:
                _set(record.queued.eta, word.eta_seconds)
        case Loads():
            record.loading.stage = word.stage
            if word.progress is not None:
                record.loading.progress = word.progress
            if word.eta_seconds is not None:
                _set(record.loading.eta, word.eta_seconds)


def _fill_decision(record: pb.DecisionRecord, noted: Noted, age_seconds: float) -> None:
    _set(record.age, max(0.0, age_seconds))
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


def _set(duration: Duration, seconds: float) -> None:
    duration.FromNanoseconds(int(seconds * _NANOSECONDS))
