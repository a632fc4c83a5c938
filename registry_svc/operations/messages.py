"""From the domain to the wire."""

from datetime import datetime

from google.protobuf import duration_pb2, timestamp_pb2

from registry_svc.operations.governance import GovernanceRules
from registry_svc.operations.live_operations import OperationView
from registry_svc.operations.policy.audit import AuditEntry, AuditHead
from registry_svc.operations.policy.lifecycle import OperationState
from weft.api.operations.v1 import operation_pb2, operation_service_pb2


def operation_message(view: OperationView, now: float) -> operation_pb2.Operation:
    """An operation as it is at `now`, seconds of the process's clock."""
    operation, progress = view.operation, view.progress
    message = operation_pb2.Operation(
        name=operation.name,
        state=operation.state.value,  # type: ignore[arg-type]  # same numbers
        reason=operation.reason.value,  # type: ignore[arg-type]  # same numbers
        detail=operation.detail or progress.detail,
        create_time=_timestamp(operation.created_at),
        action=operation_pb2.OperationAction.FromString(operation.action),
        stage=progress.stage,
        runner=operation.runner,
        requested_by=operation.requested_by,
        signers=operation.signers,
        request_id=operation.request_id,
    )
    if operation.started_at is not None:
        message.start_time.CopyFrom(_timestamp(operation.started_at))
    if operation.ended_at is not None:
        message.end_time.CopyFrom(_timestamp(operation.ended_at))
    if operation.state is OperationState.SUCCEEDED:
        message.result.CopyFrom(operation_pb2.OperationResult.FromString(operation.result))
        message.progress = 1.0
    elif progress.share is not None:
        message.progress = progress.share
    # What takes longer than it should has no known end.
    if progress.ends_at is not None and progress.ends_at > now:
        message.eta.CopyFrom(_duration(progress.ends_at - now))
    return message


def rules_message(rules: GovernanceRules) -> operation_service_pb2.GetGovernanceResponse:
    """The rules of governance."""
    return operation_service_pb2.GetGovernanceResponse(
        mode=rules.mode.value,  # type: ignore[arg-type]  # same numbers
        required_signers=rules.required_signers,
        signers=rules.signers,
        audience=rules.audience,
        token_lifetime=_duration(rules.token_lifetime_seconds),
        policy_version=rules.policy_version,
    )


def entry_message(entry: AuditEntry) -> operation_service_pb2.AuditEntry:
    """One line of the audit log."""
    draft = entry.draft
    return operation_service_pb2.AuditEntry(
        sequence=entry.sequence,
        time=_timestamp(draft.at),
        event=draft.event,
        actor=draft.actor,
        operation=draft.operation,
        detail=draft.detail,
        previous_hash=entry.previous_hash,
        hash=entry.hash,
    )


def head_message(head: AuditHead) -> operation_service_pb2.AuditHead:
    """The end of the audit log."""
    return operation_service_pb2.AuditHead(sequence=head.sequence, hash=head.hash)


def _timestamp(moment: datetime) -> timestamp_pb2.Timestamp:
    message = timestamp_pb2.Timestamp()
    message.FromDatetime(moment)
    return message


def _duration(seconds: float) -> duration_pb2.Duration:
    message = duration_pb2.Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message
