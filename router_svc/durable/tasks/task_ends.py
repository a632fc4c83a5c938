"""Ends of tasks: one receipt over all attempts, and its usage, written in the transaction that ends the task."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp

from router_svc.durable.tasks import sql_rows
from router_svc.durable.tasks.task_records import EndedTask
from router_svc.usage import (
    NOTHING,
    UsageSums,
    add_usage,
    asked_of,
    count_outcome,
    hour_of,
    retries_of,
    spent_of,
    unknown_work,
)
from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.api.router.v1 import task_pb2
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority
from weft.kernel.timestamps import duration_of, seconds_of
from weft.sql.connections import Row, Tx

ReportEnds: TypeAlias = Callable[[Sequence[EndedTask]], None]
"""Called with ended tasks after the commit."""


def ignore_ends(_: Sequence[EndedTask]) -> None:
    """ReportEnds of a store without a router."""


def settle(tx: Tx, rows: Sequence[Row], now: float) -> list[EndedTask]:
    """Counts tasks that this transaction has ended, given by their new rows; returns them.

    Their attempts must have ended.
    """
    tried = attempts_in(tx, [row.id for row in rows])
    ended = [ended_of(row, tried.get(row.id, ())) for row in rows]
    entries = []
    for row, each in zip(rows, ended, strict=True):
        receipt = each.receipt
        asked = asked_of(receipt.asked_model, row.model, receipt.model)
        sums = _spent(tried.get(row.id, ()))
        count_outcome(sums, receipt.outcome)
        sums["retried_count"] = retries_of(receipt)
        names = {"tenant": row.tenant, "key": row.caller or "local", "model": receipt.model, "asked": asked}
        entries.append({"hour": hour_of(now), **names, **NOTHING, **sums})
    tx.insert("usage_entries", *entries)
    return ended


def ended_of(row: Row, attempts: Sequence[task_pb2.TaskAttempt]) -> EndedTask:
    """Returns the ended task of a row."""
    task = sql_rows.task_of(row)
    return EndedTask(task=task, band=Priority(row.band), receipt=receipt_of(task, attempts))


def attempts_in(tx: Tx, task_ids: Iterable[str]) -> Mapping[str, list[task_pb2.TaskAttempt]]:
    """Returns the attempts of tasks in order, by task id."""
    found: dict[str, list[task_pb2.TaskAttempt]] = {}
    ids = list(task_ids)
    some = "SELECT * FROM task_attempts WHERE task_id IN :ids ORDER BY task_id, attempt"
    rows = tx.rows(some, ids=ids) if ids else ()
    for row in rows:
        found.setdefault(row.task_id, []).append(sql_rows.attempt_of(row))
    return found


def _spent(attempts: Sequence[task_pb2.TaskAttempt]) -> UsageSums:
    sums: UsageSums = {}
    for attempt in attempts:
        add_usage(sums, spent_of(attempt.receipt) if attempt.HasField("receipt") else unknown_work())
    return sums


_COUNTS = tuple(field.name for field in usage_pb2.Usage.DESCRIPTOR.fields)


def receipt_of(task: task_pb2.Task, attempts: Sequence[task_pb2.TaskAttempt]) -> receipt_pb2.Receipt:
    """Returns the receipt of a task: all attempts at runners, from its submission on.

    Tokens and prices are sums; engine figures and signals are those of the last attempt.
    """
    receipt = receipt_pb2.Receipt(model=task.model)
    granted = waited = shift = 0.0
    for attempt in attempts:
        known = attempt.receipt
        granted = _seconds(task.create_time, attempt.claim_time)
        first = seconds_of(known.attempts[0].start) if known.attempts else 0.0
        shift = granted - first
        waited += seconds_of(known.load_wait)
        _add_attempts(receipt, attempt, task, shift)
    if attempts:
        _copy_last(receipt, attempts, shift)
    took = _seconds(task.create_time, task.end_time) if task.HasField("end_time") else granted
    receipt.total_time.CopyFrom(duration_of(took))
    receipt.load_wait.CopyFrom(duration_of(waited))
    receipt.queue_wait.CopyFrom(duration_of(max(0.0, (granted if attempts else took) - waited)))
    receipt.request_id = receipt.task_id = task.id
    receipt.outcome, receipt.reason = _outcome_of(task, receipt)
    return receipt


def _add_attempts(
    receipt: receipt_pb2.Receipt, attempt: task_pb2.TaskAttempt, task: task_pb2.Task, shift: float
) -> None:
    """Adds the attempts at runners within an attempt of a task; `shift`: seconds from the submission to its offer."""
    if not attempt.HasField("receipt"):
        # Its router was lost, or it runs.
        added = receipt.attempts.add(reason=attempt.reason, message=attempt.message)
        added.start.CopyFrom(duration_of(_seconds(task.create_time, attempt.claim_time)))
        if attempt.HasField("end_time"):
            added.duration.CopyFrom(duration_of(_seconds(attempt.claim_time, attempt.end_time)))
        return
    for tried in attempt.receipt.attempts:
        added = receipt.attempts.add()
        added.CopyFrom(tried)
        added.start.CopyFrom(duration_of(shift + seconds_of(tried.start)))
    if attempt.receipt.attempts and attempt.reason and not receipt.attempts[-1].reason:
        receipt.attempts[-1].reason, receipt.attempts[-1].message = attempt.reason, attempt.message


def _copy_last(receipt: receipt_pb2.Receipt, attempts: Sequence[task_pb2.TaskAttempt], shift: float) -> None:
    """Copies what only the last attempt tells, and adds up tokens and prices."""
    last = receipt_pb2.Receipt()
    last.CopyFrom(attempts[-1].receipt)
    for name in ("attempts", "usage", "price_nanodollars"):
        last.ClearField(name)
    if not attempts[-1].receipt.attempts:
        last.ClearField("model")
    if last.HasField("time_to_first_token"):
        last.time_to_first_token.CopyFrom(duration_of(shift + seconds_of(last.time_to_first_token)))
    receipt.MergeFrom(last)
    for known in (attempt.receipt for attempt in attempts):
        receipt.left_premises |= known.left_premises
        if known.HasField("price_nanodollars"):
            receipt.price_nanodollars += known.price_nanodollars
        if known.HasField("usage"):
            receipt.usage.SetInParent()
            for name in _COUNTS:
                setattr(receipt.usage, name, getattr(receipt.usage, name) + getattr(known.usage, name))


def _outcome_of(task: task_pb2.Task, receipt: receipt_pb2.Receipt) -> "tuple[receipt_pb2.Outcome.ValueType, Any]":
    if task.state == task_pb2.TASK_STATE_COMPLETED:
        return receipt_pb2.OUTCOME_COMPLETED, 0
    if task.state == task_pb2.TASK_STATE_CANCELLED:
        return receipt_pb2.OUTCOME_CANCELLED, Reason.CANCELLED.value
    outcome = receipt_pb2.OUTCOME_FAILED if receipt.attempts else receipt_pb2.OUTCOME_REJECTED
    return outcome, task.error.reason


def _seconds(first: Timestamp, last: Timestamp) -> float:
    return max(0, last.ToNanoseconds() - first.ToNanoseconds()) / 1e9
