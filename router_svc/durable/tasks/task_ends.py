"""Ends of tasks: one receipt over all attempts, and its usage, written in the transaction that ends the task."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp

from router_svc.durable.tasks import sql_rows
from router_svc.durable.tasks.task_records import EndedTask
from router_svc.receipt_counts import ReceiptCounts
from router_svc.usage import (
    NOTHING,
    UsageSums,
    add_usage,
    asked_of,
    count_outcome,
    hour_of,
    spent_of,
    unknown_work,
)
from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.api.router.v1 import task_pb2
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.timestamps import seconds_of, set_seconds
from weft.sql.connections import Row, Tx

ReportEnds: TypeAlias = Callable[[Sequence[EndedTask]], None]
"""Called with ended tasks after the commit."""


def ignore_ends(_: Sequence[EndedTask]) -> None:
    """ReportEnds of a store without a router."""


def settle(tx: Tx, rows: Sequence[Row], now: float) -> list[EndedTask]:
    """Counts tasks that this transaction has ended, given by their new rows; returns them.

    Their attempts must have ended.
    """
    ended = tasks_in(tx, rows)
    entries = []
    for each in ended:
        task, receipt = each.task, each.receipt
        sums: UsageSums = {"retried_count": ReceiptCounts(receipt).retries}
        for attempt in each.attempts:
            add_usage(sums, spent_of(ReceiptCounts(attempt.receipt)) if attempt.HasField("receipt") else unknown_work())
        count_outcome(sums, receipt.outcome)
        asked = asked_of(receipt.asked_model, task.model, receipt.model)
        names = {"tenant": task.tenant, "key": task.caller or "local", "model": receipt.model, "asked": asked}
        entries.append({"hour": hour_of(now), **names, **NOTHING, **sums})
    tx.insert("usage_entries", *entries)
    return ended


def tasks_in(tx: Tx, rows: Sequence[Row]) -> list[EndedTask]:
    """Returns the tasks of rows with their attempts."""
    attempts: dict[str, list[task_pb2.TaskAttempt]] = {row.id: [] for row in rows}
    some = "SELECT * FROM task_attempts WHERE task_id IN :ids ORDER BY task_id, attempt"
    for row in tx.rows(some, ids=list(attempts)) if rows else ():
        attempts[row.task_id].append(sql_rows.attempt_of(row))
    return [_ended_of(row, attempts[row.id]) for row in rows]


def _ended_of(row: Row, attempts: Sequence[task_pb2.TaskAttempt]) -> EndedTask:
    task = sql_rows.task_of(row)
    return EndedTask(task=task, band=Priority(row.band), attempts=attempts, receipt=_receipt_of(task, attempts))


_COUNTS = tuple(field.name for field in usage_pb2.Usage.DESCRIPTOR.fields)


def _receipt_of(task: task_pb2.Task, attempts: Sequence[task_pb2.TaskAttempt]) -> receipt_pb2.Receipt:
    """Returns the receipt of a task: all attempts at runners, from its submission on.

    Tokens and prices are sums; engine figures and signals are those of the last attempt.
    """
    receipt = receipt_pb2.Receipt()
    if attempts:
        receipt.CopyFrom(attempts[-1].receipt)
    receipt.model = (receipt.model if receipt.attempts else "") or task.model
    for name in ("attempts", "usage", "price_nanodollars"):
        receipt.ClearField(name)
    granted = waited = shift = 0.0
    for attempt in attempts:
        known = attempt.receipt
        granted = _seconds(task.create_time, attempt.claim_time)
        first = seconds_of(known.attempts[0].start) if known.attempts else 0.0
        shift = granted - first
        waited += seconds_of(known.load_wait)
        _add_attempts(receipt, attempt, task, shift)
        _add_spent(receipt, known)
    if receipt.HasField("time_to_first_token"):
        set_seconds(receipt.time_to_first_token, shift + seconds_of(receipt.time_to_first_token))
    took = _seconds(task.create_time, task.end_time) if task.HasField("end_time") else granted
    set_seconds(receipt.total_time, took)
    set_seconds(receipt.load_wait, waited)
    set_seconds(receipt.queue_wait, max(0.0, (granted if attempts else took) - waited))
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
        set_seconds(added.start, _seconds(task.create_time, attempt.claim_time))
        if attempt.HasField("end_time"):
            set_seconds(added.duration, _seconds(attempt.claim_time, attempt.end_time))
        return
    for tried in attempt.receipt.attempts:
        added = receipt.attempts.add()
        added.CopyFrom(tried)
        set_seconds(added.start, shift + seconds_of(tried.start))
    if attempt.receipt.attempts and attempt.reason and not receipt.attempts[-1].reason:
        receipt.attempts[-1].reason, receipt.attempts[-1].message = attempt.reason, attempt.message


def _add_spent(receipt: receipt_pb2.Receipt, known: receipt_pb2.Receipt) -> None:
    """Adds tokens and price of an attempt."""
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
