"""Migrates batches from a column per field to a column of messages."""

import json
from typing import Any

from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.kernel.timestamps import optional_stamp, stamp_of
from weft.sql.connections import Tx

_TEXTS = ("endpoint", "input_file", "output_file", "error_file", "result_base")
_COUNTS = ("total_count", "completed_count", "failed_count", "cancelled_count", "expired_count")


def move_batches(tx: Tx) -> None:
    """Fills the message column and drops the replaced columns."""
    for row in tx.rows("SELECT * FROM batches"):
        batch = batch_pb.Batch(
            id=row.id,
            tenant=row.tenant,
            # While lines are being received, the message has the later state.
            state=max(row.state, 0) or batch_pb.BATCH_STATE_IN_PROGRESS,
            errors=[batch_pb.BatchLineError(**error) for error in json.loads(row.errors)],
            metadata=json.loads(row.metadata),
            create_time=stamp_of(row.created_at),
            window_end_time=stamp_of(row.window_ends_at),
            cancel_time=optional_stamp(row.cancelled_at),
            lines_end_time=optional_stamp(row.lines_ended_at),
            end_time=optional_stamp(row.ended_at),
            **{name: getattr(row, name) for name in (*_TEXTS, *_COUNTS)},
        )
        values: dict[str, Any] = {"seq": row.seq, "batch": batch.SerializeToString()}
        tx.update("batches", "seq", values)
    for column in (*_TEXTS, *_COUNTS, "metadata", "errors", "window_ends_at", "cancelled_at"):
        tx.execute(f"ALTER TABLE batches DROP COLUMN {column}")
