"""One running registry for the tests that need no more."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from registry_harness import RunningRegistry, running_registry


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[RunningRegistry]:
    async with running_registry(tmp_path) as running:
        yield running
