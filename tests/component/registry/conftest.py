"""One running registry for the tests that need no more."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lease_stage import Stage
from registry_harness import RunningRegistry, running_registry


@pytest.fixture
def registry_url(tmp_path: Path) -> str:
    """Where the registry keeps things; modules that run on every database have one of their own."""
    return f"sqlite:///{tmp_path}/registry.db"


@pytest.fixture
async def mesh(tmp_path: Path, registry_url: str) -> AsyncIterator[RunningRegistry]:
    async with running_registry(tmp_path, database_url=registry_url) as running:
        yield running


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """A ledger with one host; modules about other things have a stage of another kind."""
    async with Stage() as stage:
        yield stage
