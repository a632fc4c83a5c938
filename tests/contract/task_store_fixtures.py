"""Stores of tasks for tests: a pytest plugin, because their suite has several modules."""

from collections.abc import AsyncIterator

import pytest
from stored_tasks import (
    store_on,
)

from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.store.database import RouterDatabase


@pytest.fixture
async def kept(database_url: str) -> AsyncIterator[SqlTaskStore]:
    """Started, empty, stopped afterwards."""
    store = store_on(database_url)
    await store.start()
    yield store
    await store.stop()


@pytest.fixture
async def beside(database_url: str) -> AsyncIterator[RouterDatabase]:
    """The same database, past the store."""
    database = RouterDatabase(database_url)
    await database.open()
    yield database
    await database.close()
