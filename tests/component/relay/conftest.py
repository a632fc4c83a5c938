"""The mesh's side of a relay for the tests that need no other."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from relay_harness import Mesh, running_mesh_side


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with running_mesh_side(tmp_path) as mesh:
        yield mesh
