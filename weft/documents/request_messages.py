"""From the messages of the wire to the documents of requests and clients."""

from datetime import UTC, datetime
from typing import Any, cast

from google.protobuf.duration_pb2 import Duration

from weft.api.common.v1 import priority_pb2, receipt_pb2
from weft.api.router.v1 import request_pb2 as pb
from weft.documents.request_documents import (
    AttemptDocument,
    CandidateDocument,
    ClientDocument,
    ClientTargetDocument,
    DecisionDocument,
    LoadingDocument,
    QueuedDocument,
    ReceiptDocument,
    RequestDocument,
)
from weft.kernel.reasons import Reason


def request_document(record: pb.RequestRecord) -> RequestDocument:
    """One request."""
    return RequestDocument(
        kind="request",
        request_id=record.request_id,
        tenant=record.tenant,
        client_id=record.client_id or None,
        target=record.target,
        priority=_band(record.priority),
        state=cast("Any", enum_word(pb.RequestRecord.State, record.state, "STATE_")),
        arrived_at=record.arrive_time.ToDatetime(tzinfo=UTC),
        ended_at=moment(record, "end_time"),
        queued=_queued(record),
        loading=_loading(record),
        reason=reason_word(record.reason),
        message=record.message or None,
        receipt=receipt_document(record.receipt) if record.HasField("receipt") else None,
        decisions=tuple(map(_decision, record.decisions)),
    )


def client_document(record: pb.ClientRecord) -> ClientDocument:
    """One client."""
    return ClientDocument(
        kind="client",
        client_id=record.client_id,
        has_profile=record.has_profile,
        request_count=record.request_count,
        refused_count=record.refused_count,
        running_count=record.running_count,
        token_count=record.token_count,
        targets=tuple(
            ClientTargetDocument(target=target.target, request_count=target.request_count) for target in record.targets
        ),
        usual_interval_seconds=seconds_in(record, "usual_interval"),
        first_seen_at=moment(record, "first_seen_time"),
        last_seen_at=moment(record, "last_seen_time"),
        cooldown_ends_at=moment(record, "cooldown_end_time"),
        route=record.route or None,
        default_priority=_band(record.default_priority or priority_pb2.PRIORITY_NORMAL),
    )


def _queued(record: pb.RequestRecord) -> QueuedDocument | None:
    if not record.HasField("queued"):
        return None
    queued = record.queued
    return QueuedDocument(position=queued.position, reason=queued.reason, eta_seconds=seconds_in(queued, "eta"))


def _loading(record: pb.RequestRecord) -> LoadingDocument | None:
    if not record.HasField("loading"):
        return None
    loading = record.loading
    return LoadingDocument(
        stage=loading.stage,
        progress=loading.progress if loading.HasField("progress") else None,
        eta_seconds=seconds_in(loading, "eta"),
    )


def _decision(decision: pb.DecisionRecord) -> DecisionDocument:
    return DecisionDocument(
        kind=cast("Any", enum_word(pb.DecisionRecord.Kind, decision.kind, "KIND_")),
        age_seconds=_seconds(decision.age),
        detail=decision.detail,
        policy=decision.policy or None,
        candidates=tuple(
            CandidateDocument(
                model=candidate.model,
                runner=candidate.runner or None,
                score=candidate.score,
                gate=candidate.gate or None,
                chosen=candidate.chosen,
            )
            for candidate in decision.candidates
        ),
        candidate_count=decision.candidate_count,
    )


def receipt_document(receipt: receipt_pb2.Receipt) -> ReceiptDocument:
    """What happened to a request; what is not known is None."""
    usage, is_counted = receipt.usage, receipt.HasField("usage")
    return ReceiptDocument(
        outcome=cast("Any", enum_word(receipt_pb2.Outcome, receipt.outcome, "OUTCOME_")),
        attempts=tuple(
            AttemptDocument(runner=attempt.runner, model=attempt.model or None, reason=reason_word(attempt.reason))
            for attempt in receipt.attempts
        ),
        model=receipt.model or None,
        host=receipt.host or None,
        queue_wait_seconds=_seconds(receipt.queue_wait),
        load_wait_seconds=_seconds(receipt.load_wait),
        time_to_first_token_seconds=seconds_in(receipt, "time_to_first_token"),
        prompt_tokens=usage.prompt_tokens if is_counted else None,
        cached_prompt_tokens=usage.cached_prompt_tokens if is_counted else None,
        completion_tokens=usage.completion_tokens if is_counted else None,
        gpu_seconds=seconds_in(receipt, "gpu_time"),
        tokens_per_second=receipt.tokens_per_second or None,
        left_premises=receipt.left_premises,
    )


def _band(number: int) -> Any:
    return enum_word(priority_pb2.Priority, number, "PRIORITY_")


def enum_word(enum: Any, number: int, prefix: str) -> str:
    """STATE_RUNNING is running; a number that is not set, or not known to this version, is unknown."""
    names: dict[int, str] = {value: name for name, value in enum.items() if value}
    return names.get(number, "").removeprefix(prefix).lower() or "unknown"


def reason_word(number: int) -> str | None:
    """A reason by its name; None: there is none."""
    if not number:
        return None
    try:
        return Reason(number).name.lower()
    except ValueError:
        return "unknown"


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def seconds_in(message: Any, field: str) -> float | None:
    """A duration in a message; None: it is not set."""
    return _seconds(getattr(message, field)) if message.HasField(field) else None


def moment(message: Any, field: str) -> datetime | None:
    """A time in a message; None: it is not set."""
    return getattr(message, field).ToDatetime(tzinfo=UTC) if message.HasField(field) else None
