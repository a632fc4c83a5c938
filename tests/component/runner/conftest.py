"""Starts the fake engines of these tests warm, unless a test is about the start or the end of processes."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from warm_guardian import spawn_cold, warm_guardians

from runner_svc.supervise import guarded_engine

COLD = {
    "test_leftovers_of_a_runner",
    "test_many_kills",
    "test_no_orphans",
    "test_supervised_process",
}
"""Modules about processes, their arguments, and what is left of them."""


@pytest.fixture(autouse=True, scope="module")
def warm_engines(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forks fake engines and their guardians from a process that has imported them."""
    with nullcontext() if request.module.__name__ in COLD else warm_guardians():
        yield


@pytest.fixture
def cold_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts the engines of one test as ordinary programs."""
    monkeypatch.setattr(guarded_engine, "_spawn_guardian", spawn_cold)
