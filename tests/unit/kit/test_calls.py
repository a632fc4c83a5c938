"""Counting the functions that a call runs."""

import gc
from collections.abc import Iterator

import pytest
from kit.calls import calls_of


class _Cycle:
    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None: ...


@pytest.fixture
def collecting_at_every_object() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collecting_at_every_object")
def test_calls_of_a_garbage_collection_are_not_counted() -> None:
    """A test of a hot path failed when a collection ran the finalizers of other tests in it."""

    def function() -> None:
        for _ in range(100):
            _Cycle()

    assert calls_of(function) == ["__init__"] * 100
    assert gc.isenabled()
