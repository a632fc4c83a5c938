"""Answers that are kept beside a router, in a file that others lock, on a disk that is full."""

import asyncio
import resource
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kit.refusals import refused
from structlog.testing import capture_logs

from router_svc.durable.limits import ResponseLimits
from router_svc.durable.stored_responses import ResponseService
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import stored_response_service_pb2
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import stamp_of

MADE = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)
PATIENCE_MS = 20
MOST_BYTES = 128 * 1024


def response(name: str, *, body: bytes = b"b") -> stored_response_service_pb2.StoredResponse:
    return stored_response_service_pb2.StoredResponse(
        id=name, tenant="ann", previous_id="", create_time=stamp_of(MADE), body=body, items=b"[]"
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "router.db"


def built(file: Path) -> ResponseService:
    return ResponseService(RouterDatabase(f"sqlite:///{file}"), ResponseLimits())


@pytest.fixture
async def service(file: Path) -> AsyncIterator[ResponseService]:
    """Started, with `resp_1` in it."""
    service = built(file)
    await service.start()
    await service.store.save(response("resp_1"))
    yield service
    await service.stop(0)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Somebody else writes, as a backup may."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.close()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def unavailable(awaited: Any) -> None:
    with refused(Reason.SERVICE_UNAVAILABLE):
        await awaited


async def missing(service: ResponseService, name: str) -> None:
    with refused(Reason.NOT_FOUND):
        await service.store.get("ann", name)


async def test_write_waits_for_another_writer_and_a_read_does_not_wait(service: ResponseService, file: Path) -> None:
    with locked(file):
        saving = asyncio.create_task(service.store.save(response("resp_2")))
        for _ in range(5):
            assert (await service.store.get("ann", "resp_1")).id == "resp_1"
        assert not saving.done()
    await saving
    assert (await service.store.get("ann", "resp_2")).id == "resp_2"


async def test_locked_file_is_unavailable_and_nothing_is_stored(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setattr("weft.sql.connections.BUSY_TIMEOUT_MS", PATIENCE_MS)
    service = built(file)
    await service.start()
    await service.store.save(response("resp_1"))
    with locked(file), capture_logs() as lines:
        await unavailable(service.store.save(response("resp_2")))
        await unavailable(service.store.delete("ann", "resp_1"))
        assert [step.id for step in await service.store.chain("ann", "resp_1")] == ["resp_1"]
    assert [line["code"] for line in lines] == ["SQLITE_BUSY", "SQLITE_BUSY"]
    await missing(service, "resp_2")
    await service.store.save(response("resp_3"))
    await service.stop(0)


async def test_write_cancelled_while_waiting_is_not_executed_and_blocks_no_other(
    service: ResponseService, file: Path
) -> None:
    with locked(file):
        saving = asyncio.create_task(service.store.save(response("resp_2")))
        await service.store.get("ann", "resp_1")
        saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    await missing(service, "resp_2")
    await service.store.save(response("resp_3"))


async def test_router_starts_while_its_file_is_locked(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setattr("weft.sql.connections.BUSY_TIMEOUT_MS", PATIENCE_MS)
    first = built(file)
    await first.start()
    await first.store.save(response("resp_1"))
    await first.stop(0)
    second = built(file)
    with locked(file):
        await second.start()
        assert (await second.store.get("ann", "resp_1")).id == "resp_1"
    await second.store.save(response("resp_2"))
    await second.stop(0)


async def test_full_disk_rejects_writes_with_an_error_and_still_reads(service: ResponseService) -> None:
    with full_disk():
        await unavailable(service.store.save(response("resp_2", body=b"b" * 2 * MOST_BYTES)))
        assert (await service.store.get("ann", "resp_1")).id == "resp_1"
    await missing(service, "resp_2")
    await service.store.save(response("resp_3", body=b"b" * 2 * MOST_BYTES))


async def test_deleted_data_is_not_left_in_the_file(service: ResponseService, file: Path) -> None:
    secret = b"the-words-of-ann" * 1000
    await service.store.save(response("resp_2", body=secret))
    await service.store.delete("ann", "resp_2")
    await service.stop(0)
    assert all(secret[:16] not in path.read_bytes() for path in file.parent.iterdir())
