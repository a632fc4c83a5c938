"""Every test here starts a mesh of real processes, so all but the main path are in the slow tier."""

from pathlib import Path

import pytest
from shared_mesh import common_mesh, mesh_of_the_session

__all__ = ["common_mesh", "mesh_of_the_session"]

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    for item in items:
        if item.path.is_relative_to(HERE) and not any(map(item.get_closest_marker, ("main_path", "nightly"))):
            item.add_marker(pytest.mark.slow("starts a mesh"))
