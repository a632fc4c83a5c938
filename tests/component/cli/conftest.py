"""Starts the server of warm programs before the tests that use it."""

import pytest
from kit import warm_python


@pytest.fixture(autouse=True, scope="module")
def warm_programs(request: pytest.FixtureRequest) -> None:
    """Pays for the imports of all programs once, and in no test."""
    if warm_python.IS_POSSIBLE and "warm" in vars(request.module):
        warm_python._warm_start.server()
