"""Writes the messages of request records from before schema 0018, which had a column per field."""

from typing import Any

from weft.api.router.v1 import request_pb2
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.timestamps import stamp_of
from weft.sql.connections import Tx

ROWS_AT_ONCE = 500


def write_request_messages(tx: Tx) -> None:
    """Fills the column `record`, from the columns that 0019.sql drops."""
    last = {"incarnation": "", "key": 0}
    page = """SELECT * FROM request_records WHERE (incarnation, key) > (:incarnation, :key)
        ORDER BY incarnation, key LIMIT :limit"""
    change = "UPDATE request_records SET record = :record WHERE incarnation = :incarnation AND key = :key"
    while rows := tx.rows(page, **last, limit=ROWS_AT_ONCE):
        tx.many(change, [{"incarnation": row.incarnation, "key": row.key, "record": _message(row)} for row in rows])
        last = {"incarnation": rows[-1].incarnation, "key": rows[-1].key}


def _message(row: Any) -> bytes:
    record = request_pb2.RequestRecord.FromString(row.decisions)
    record.request_id, record.tenant, record.client_id = row.request_id, row.tenant, row.client_id
    record.target, record.asked_model = row.target, row.asked_model
    record.priority = Priority(row.priority).wire  # type: ignore[assignment]  # same numbers
    record.arrive_time.CopyFrom(stamp_of(row.arrived_at))
    record.cancelled_by = row.cancelled_by
    if row.ended_at is not None:
        record.state = request_pb2.RequestRecord.STATE_ENDED
        record.reason, record.message = row.reason, row.message
        record.end_time.CopyFrom(stamp_of(row.ended_at))
    if row.receipt is not None:
        record.receipt.ParseFromString(row.receipt)
    return record.SerializeToString()
