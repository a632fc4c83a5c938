"""Conversion between rows and messages of tasks, attempts and answers."""

import hashlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Sequence
from typing import Any

from router_svc.durable.tasks.task_records import LOST_LEASE, Lane, NewTask, TaskLease
from weft.api.common.v1 import error_reason_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.api.router.v1 import task_service_pb2 as pb
from weft.durable.tasks import event_number, task_error
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason, reason_of
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.timestamps import optional_stamp, stamp_of
from weft.sql.connections import Row, Tx

LOST = task_error(LOST_LEASE, "the router that ran it sent no heartbeats")
MAX_ERROR_CHARS = 2_000
_TOKEN_MARK_BYTES = 8
_TOKEN_SEQ_BYTES = 8

NO_SEQ = 2**63 - 1
"""Above every existing `seq`."""
SPECS = "SELECT task_id, spec FROM task_specs WHERE task_id IN :ids"
STAGED = 0
"""State of an item whose batch is being received: it is invisible and does not start."""
READY_NOW = 0.0
"""`ready_at` of a task without a pause. It is 0 rather than now, to be ready by every router's clock even after a clock
was set back."""


def insert_rows(tx: Tx, new: Sequence[NewTask], *, state: int = task_pb2.TASK_STATE_PENDING) -> None:
    """Inserts new tasks; their ids and idempotency keys must be free."""
    tx.insert("tasks", *(values_of(each, state) for each in new))
    tx.insert("task_specs", *({"task_id": each.task.id, "spec": each.spec} for each in new))


def values_of(new: NewTask, state: int) -> dict[str, object]:
    """Returns the columns of a new task."""
    task = new.task
    has_labels = task.user or task.metadata
    labels = task_pb2.TaskSpec(user=task.user, metadata=task.metadata) if has_labels else None
    return {
        "id": task.id,
        "tenant": task.tenant,
        "idempotency_key": new.idempotency_key or None,
        "digest": new.digest,
        "state": state,
        "model": task.model,
        "band": new.band.value,
        "batch_id": task.batch,
        "line": task.line,
        "custom_id": new.custom_id,
        "origin_kind": task.origin_kind,
        "caller": task.caller,
        "request_id": task.request_id or None,
        "labels": None if labels is None else labels.SerializeToString(deterministic=True),
        "attempt": 0,
        "failures": 0,
        "max_attempts": task.max_attempts,
        "owner": "",
        "lease_until": None,
        "lease_seconds": None,
        "pending_limit_seconds": new.pending_limit_seconds,
        "window_ends_at": new.window_ends_at,
        "ready_at": READY_NOW,
        "expires_at": new.expires_at,
        "created_at": new.created_at,
        "started_at": None,
        "ended_at": None,
        "last_index": 0,
        "result_size": 0,
        "request_size": len(new.spec),
        "error_reason": Reason.UNSPECIFIED.value,
        "error_message": "",
    }


_NO_LABELS = task_pb2.TaskSpec()


def task_of(row: Row) -> task_pb2.Task:
    """Returns the task of a row."""
    # A task that was cancelled by its request id has the canceller in its error.
    is_reported = row.state == task_pb2.TASK_STATE_FAILED or (
        row.state == task_pb2.TASK_STATE_CANCELLED and row.error_reason == Reason.CANCELLED.value
    )
    labels = task_pb2.TaskSpec.FromString(row.labels) if row.labels else _NO_LABELS
    return task_pb2.Task(
        id=row.id,
        tenant=row.tenant,
        state=row.state,
        model=row.model,
        batch=row.batch_id,
        line=row.line,
        create_time=stamp_of(row.created_at),
        start_time=optional_stamp(row.started_at),
        end_time=optional_stamp(row.ended_at),
        expire_time=stamp_of(row.expires_at) if row.state == task_pb2.TASK_STATE_PENDING else None,
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        error=task_error(reason_of(row.error_reason), row.error_message) if is_reported else None,
        last_event=event_number(row.attempt, row.last_index) if row.last_index else 0,
        origin_kind=row.origin_kind,
        owner=row.owner,
        caller=row.caller,
        user=labels.user,
        metadata=labels.metadata,
        request_id=row.request_id,
        retry=_retry_of(row),
    )


def _retry_of(row: Row) -> task_pb2.TaskRetry | None:
    """Returns what a task waits for after a failed attempt; None: it does not."""
    if row.state != task_pb2.TASK_STATE_PENDING or not row.error_reason:
        return None
    return task_pb2.TaskRetry(
        error=task_error(reason_of(row.error_reason), row.error_message),
        next_time=optional_stamp(row.ready_at or None),
        failed_count=row.failures,
        max_attempts=row.max_attempts,
    )


def lane_of(row: Row) -> Lane:
    """Returns the lane of a row."""
    return Lane(row.model, row.tenant, Priority(row.band))


def attempt_of(row: Row) -> task_pb2.TaskAttempt:
    """Returns the attempt of a row."""
    return task_pb2.TaskAttempt(
        attempt=row.attempt,
        owner=row.owner,
        claim_time=stamp_of(row.claimed_at),
        end_time=optional_stamp(row.ended_at),
        reason=error_reason_pb2.ErrorReason.ValueType(reason_of(row.reason)),
        message=row.message,
        receipt=receipt_pb2.Receipt.FromString(row.receipt) if row.receipt else None,
    )


def piece_of(row: Any, attempt: int, after_index: int) -> task_pb2.TaskPiece | None:
    """Returns the rest of a piece after an event; None: nothing is left."""
    last = row.first_index + row.event_count - 1
    if last <= after_index:
        return None
    piece = task_pb2.TaskPiece(attempt=attempt, last_event=event_number(attempt, last))
    piece.output.ParseFromString(row.output)
    del piece.output.events[: max(0, after_index + 1 - row.first_index)]
    return piece


def why_never(row: Any, refusal: str) -> task_pb2.TaskError:
    """Returns why an expired pending task failed; `refusal`: of its last offer, empty if it waited for a slot."""
    begun = "begun again" if row.attempt else "begun"
    why = refusal or "no runner had a slot for it"
    if not refusal and row.error_reason:
        why = f"its last attempt failed: {row.error_message}"
    if row.window_ends_at is not None:
        return task_error(Reason.DEADLINE_EXCEEDED, f"its window ended before it was {begun}: {why}")
    return task_error(Reason.QUEUE_TIMEOUT, f"it waited {row.pending_limit_seconds:g} s and was not {begun}: {why}")


def given_up(row: Row) -> task_pb2.TaskError:
    """Returns why a task failed after its last lease expired."""
    times = f"{row.failures + 1} attempts" if row.failures else "1 attempt"
    return task_error(LOST_LEASE, f"{LOST.message}; given up after {times}")


def submission_of(new: NewTask, found: Row) -> pb.SubmitTaskResponse:
    """Returns the result of a submission with the idempotency key of task `found`. Raises IDEMPOTENCY_CONFLICT."""
    if found.digest != new.digest:
        raise WeftError(
            Reason.IDEMPOTENCY_CONFLICT, "this idempotency key was used with another request; use a new one"
        )
    return pb.SubmitTaskResponse(task=task_of(found), existed=True)


def as_many_as_fit(rows: Sequence[Any], max_bytes: int) -> Sequence[Any]:
    """Returns the first rows that fit, at least one if there are any."""
    total = 0
    for count, row in enumerate(rows):
        total += row.size
        if count and total > max_bytes:
            return rows[:count]
    return rows


# -- parameters of statements


def lane_parameters(lane: Lane) -> dict[str, object]:
    """Returns the parameters of a lane."""
    return {"model": lane.model, "tenant": lane.tenant, "band": lane.band.value}


def claim_parameters(claim: TaskLease) -> dict[str, object]:
    """Returns the parameters that match a claim."""
    return {"id": claim.task_id, "owner": claim.owner, "attempt": claim.attempt}


def failure_parameters(failure: task_pb2.TaskError) -> dict[str, object]:
    """Returns the parameters of an error; its text is truncated, without characters that a database refuses."""
    message = failure.message[:MAX_ERROR_CHARS].replace("\x00", "").encode("utf-8", "replace").decode()
    return {"reason": failure.reason, "message": message}


def end_parameters(row: Any, failure: task_pb2.TaskError, now: float) -> dict[str, object]:
    """Returns the parameters that end a task without a claim."""
    return {"seq": row.seq, "now": now, **failure_parameters(failure)}


# -- page tokens


def mark_of(tenant: str, request: pb.ListTasksRequest) -> bytes:
    """Returns a digest of the filters, by which a page token is bound to its query."""
    own: tuple[object, ...] = (tenant, sorted(set(request.states)), request.model, request.batch)
    later = (request.caller, request.request_id, request.origin_kind)
    filters = repr((*own, *later) if any(later) else own)
    return hashlib.sha256(filters.encode("utf-8", "surrogatepass")).digest()[:_TOKEN_MARK_BYTES]


def token_of(seq: int, mark: bytes) -> str:
    """Returns the token of the page after `seq`."""
    return urlsafe_b64encode(mark + seq.to_bytes(_TOKEN_SEQ_BYTES)).decode()


def seq_of(token: str, mark: bytes) -> int:
    """Returns the `seq` of a page token. Raises INVALID_ARGUMENT if it is invalid or has another mark."""
    try:
        raw = urlsafe_b64decode(token.encode("ascii"))
    except (UnicodeEncodeError, Base64Error, ValueError):
        raw = b""
    seq = int.from_bytes(raw[_TOKEN_MARK_BYTES:])
    if len(raw) != _TOKEN_MARK_BYTES + _TOKEN_SEQ_BYTES or not raw.startswith(mark) or seq >= 1 << 63:
        raise invalid_field("page_token", "must be the next_page_token of the same query")
    return seq
