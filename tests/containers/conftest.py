"""Podman for the tests of containers; they are skipped where there can be none."""

import pytest
from podman import Podman, missing


@pytest.fixture(scope="session")
def podman() -> Podman:
    if why := missing():
        pytest.skip(why)
    return Podman.found()
