"""Batches of the release before had a column per field: their rows become messages, on either database."""

import json
import shutil
from pathlib import Path
from typing import Any

from router_svc.durable.batches.batch_sql import RECEIVING, BatchStore
from router_svc.store.database import SCHEMA, RouterDatabase
from weft.api.router.v1 import batch_service_pb2 as pb
from weft.kernel.timestamps import stamp_of
from weft.sql.migrations import Schema
from weft.sql.store import Store

pytest_plugins = ("database_fixtures",)

BEGAN = 1_795_674_385.5
KNOWN = pb.Batch(
    id="batch-1",
    tenant="ann",
    state=pb.BATCH_STATE_FINISHED,
    endpoint="/v1/chat/completions",
    input_file="file-1",
    output_file="file-2",
    errors=[pb.BatchLineError(code="c", message="ä", line=3, field="model")],
    total_count=4,
    completed_count=1,
    failed_count=1,
    cancelled_count=1,
    expired_count=1,
    metadata={"of": "the release"},
    result_base="https://mesh",
    create_time=stamp_of(BEGAN),
    window_end_time=stamp_of(BEGAN + 60),
    cancel_time=stamp_of(BEGAN + 1),
    lines_end_time=stamp_of(BEGAN + 2),
    end_time=stamp_of(BEGAN + 3),
)
_TIMES = {"created_at": 0, "window_ends_at": 60, "cancelled_at": 1, "lines_ended_at": 2, "ended_at": 3}
_COPIED = (
    *("id", "tenant", "state", "endpoint", "input_file", "output_file", "error_file", "total_count"),
    *("completed_count", "failed_count", "cancelled_count", "expired_count", "result_base"),
)


async def test_batches_of_the_previous_release_are_migrated(database_url: str, tmp_path: Path) -> None:
    scripts = tmp_path / "schema"
    scripts.mkdir()
    for number in ("0012", "0013"):
        shutil.copy(SCHEMA.scripts / f"{number}.sql", scripts)
    before = Store(
        database_url, "router", schema=Schema(owner="router", scripts=scripts, version_table=SCHEMA.version_table)
    )
    row: dict[str, Any] = {name: getattr(KNOWN, name) for name in _COPIED}
    row |= {name: BEGAN + seconds for name, seconds in _TIMES.items()}
    row["metadata"] = json.dumps(dict(KNOWN.metadata)).encode()
    row["errors"] = json.dumps([{"code": "c", "message": "ä", "line": 3, "field": "model"}]).encode()
    await before.open()
    await before.run(lambda tx: tx.insert("batches", row, row | {"id": "batch-2", "state": RECEIVING}))
    await before.close()
    database = RouterDatabase(database_url)
    await database.open()
    store = BatchStore(database)
    assert await store.get("ann", "batch-1") == KNOWN
    assert await store.get("ann", "batch-2") is None
    assert await store.activate("batch-2", 7)
    begun = await store.get("ann", "batch-2")
    assert begun is not None
    assert (begun.state, begun.total_count) == (pb.BATCH_STATE_IN_PROGRESS, 7)
    await database.close()
