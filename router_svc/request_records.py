"""What the request log holds, as messages, made when somebody reads; decisions already are (`decision_records`)."""

from datetime import timedelta

from router_svc.decision_records import add_decisions, set_seconds
from router_svc.policy.decisions import Loads, Placed, Waits
from router_svc.request_entry import EndedRequest, RequestEntry
from weft.api.router.v1 import request_pb2 as pb


def request_record(entry: RequestEntry | EndedRequest, *, with_decisions: bool) -> pb.RequestRecord:
    """One request."""
    record = pb.RequestRecord(
        request_id=entry.request_id,
        tenant=entry.tenant,
        client_id=entry.client_id,
        target=entry.target,
        priority=entry.priority.wire,  # type: ignore[arg-type]  # same numbers
    )
    record.arrive_time.FromDatetime(entry.arrived_wall)
    if isinstance(entry, EndedRequest):
        _fill_end(record, entry, with_decisions=with_decisions)
        return record
    record.state = _state(entry)
    _fill_wait(record, entry.word)
    if with_decisions:
        add_decisions(record, entry.decisions, entry.arrived_at)
    return record


def _fill_end(record: pb.RequestRecord, ended: EndedRequest, *, with_decisions: bool) -> None:
    record.state = pb.RequestRecord.STATE_ENDED
    record.reason = ended.reason.value  # type: ignore[assignment]  # same numbers
    record.message = ended.message
    record.end_time.FromDatetime(ended.arrived_wall + timedelta(seconds=ended.ended_at - ended.arrived_at))
    if ended.receipt is not None:
        record.receipt.ParseFromString(ended.receipt)
    if with_decisions:
        record.MergeFromString(ended.decisions)


def _state(entry: RequestEntry) -> "pb.RequestRecord.State.ValueType":
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
                set_seconds(record.queued.eta, word.eta_seconds)
        case Loads():
            record.loading.stage = word.stage
            if word.progress is not None:
                record.loading.progress = word.progress
            if word.eta_seconds is not None:
                set_seconds(record.loading.eta, word.eta_seconds)
