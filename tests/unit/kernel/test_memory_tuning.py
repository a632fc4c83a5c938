"""The garbage collector around the imports of a service, and memory that goes back to the system."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.forked_programs import Program, run_forked

from weft.kernel.machine.memory_tuning import large_imports


@pytest.fixture(autouse=True)
def the_collector_as_it_was() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


SERVICE = """
import gc
from weft.kernel.machine.memory_tuning import YOUNG_OBJECTS, large_imports, settle_memory

class Cycle:
    alive = 0

    def __init__(self):
        Cycle.alive += 1
        self.itself = self

    def __del__(self):
        Cycle.alive -= 1

with large_imports():
    assert not gc.isenabled()
    Cycle()
assert gc.isenabled()
assert gc.get_threshold()[0] == YOUNG_OBJECTS
assert Cycle.alive == 1
settle_memory()
assert Cycle.alive == 0
"""
"""A process of its own: to collect everything in this one takes seconds."""


def test_garbage_collection_is_paused_during_import_and_runs_once_afterwards(tmp_path: Path) -> None:
    (ended,) = run_forked([Program(SERVICE)], tmp_path)
    assert ended.code == 0, ended.stderr


def test_garbage_collection_resumes_after_a_failed_import() -> None:
    with pytest.raises(ImportError), large_imports():
        raise ImportError
    assert gc.isenabled()
