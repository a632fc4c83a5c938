"""The schemas of databases in an answer about the health of a process."""

import asyncio

import pytest

from weft.api.operations.v1.process_service_pb2 import DatabaseSchema
from weft_app.compose.process_service import SchemaLooks
from weft_testing.fake_clock import let_all_run

KNOWN = DatabaseSchema(service="router", known_revision="0008", database_revision="0008")


class _FrozenDatabase:
    """A database that answers once it is thawed."""

    known_schema = DatabaseSchema(service="registry", known_revision="0015")

    def __init__(self) -> None:
        self.thawed = asyncio.Event()
        self.asked = 0

    async def schema(self) -> DatabaseSchema:
        self.asked += 1
        await self.thawed.wait()
        return DatabaseSchema(service="registry", known_revision="0015", database_revision="0014")


class _Database:
    """A database that answers at once."""

    known_schema = KNOWN

    async def schema(self) -> DatabaseSchema:
        return KNOWN


async def test_version_reply_does_not_wait_for_a_frozen_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_app.compose.process_service.SCHEMA_SECONDS", 0.01)
    frozen = _FrozenDatabase()
    looks = SchemaLooks([frozen, _Database()])
    assert await looks.known() == [frozen.known_schema, KNOWN]
    await looks.stop()


async def test_pending_schema_read_of_a_frozen_database_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = _FrozenDatabase()
    looks = SchemaLooks([frozen])
    with monkeypatch.context() as impatient:
        impatient.setattr("weft_app.compose.process_service.SCHEMA_SECONDS", 0.01)
        assert await looks.known() == [frozen.known_schema]
    again = asyncio.create_task(looks.known())
    await let_all_run()
    frozen.thawed.set()
    assert [found.database_revision for found in await again] == ["0014"]
    assert frozen.asked == 1


async def test_process_without_databases_does_not_wait() -> None:
    assert await SchemaLooks([]).known() == []
