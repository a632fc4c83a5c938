"""Usage entries of ended tasks, written in the transaction of the end so that none is lost or counted twice."""

from collections.abc import Sequence
from typing import Any

from router_svc.usage import (
    NOTHING,
    Outcome,
    UsageSums,
    asked_of,
    count_outcome,
    hour_of,
    spent_of,
    unknown_work,
    usage_of,
)
from weft.api.common.v1 import receipt_pb2
from weft.sql.connections import Tx

Entry = dict[str, object]


def ended_attempt(task: Any, now: float, receipt: bytes, outcome: "Outcome | None") -> Entry:
    """Returns the entry of an attempt that ended under its claim; `task`: a row with tenant, caller and model.

    `outcome`: of the task, if it has no receipt; None: the task is retried.
    """
    if not receipt:
        return ended_without_receipt(task, now, outcome)
    known = receipt_pb2.Receipt.FromString(receipt)
    model = known.model if known.attempts else task.model
    asked = asked_of(known.asked_model, task.model, model)
    if outcome is None:
        sums = spent_of(known)
        sums["retried_count"] = 1
    else:
        sums = usage_of(known)
    return _entry(task, now, model, asked, sums)


def ended_without_receipt(task: Any, now: float, outcome: "Outcome | None", *, was_running: bool = True) -> Entry:
    """Returns the entry of an attempt, or of a task without one, that ended without a receipt; as above."""
    sums = unknown_work() if was_running else {}
    if outcome is None:
        sums["retried_count"] = 1
    else:
        count_outcome(sums, outcome)
    return _entry(task, now, task.model, "", sums)


def add_entries(tx: Tx, entries: Sequence[Entry]) -> None:
    """Writes entries in a transaction."""
    tx.insert("usage_entries", *entries)


def _entry(task: Any, now: float, model: str, asked: str, sums: UsageSums) -> Entry:
    names = {"tenant": task.tenant, "key": task.caller or "local", "model": model, "asked": asked}
    return {"hour": hour_of(now), **names, **NOTHING, **sums}
