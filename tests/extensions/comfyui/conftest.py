"""Starts the fake engines of these tests warm."""

from collections.abc import Iterator

import pytest
from warm_guardian import warm_guardians


@pytest.fixture(autouse=True, scope="module")
def warm_engines() -> Iterator[None]:
    """Forks fake engines and their guardians from a process that has imported them."""
    with warm_guardians():
        yield
