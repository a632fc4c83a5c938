"""The limit of a process's open files."""

import resource
from collections.abc import Iterator

import pytest

from weft.kernel.machine.open_files import MAX_RAISED, max_connections, raise_open_files


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit of this process, whose soft limit is reset after the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_service_raises_its_open_files_to_the_hard_limit_at_most_to_the_bound(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    raise_open_files()
    most = MAX_RAISED if hard == resource.RLIM_INFINITY else min(hard, MAX_RAISED)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    assert max_connections() == most // 2


def test_a_service_keeps_a_higher_limit_of_open_files(hard: int) -> None:
    higher = MAX_RAISED + 1 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (higher, hard))
    raise_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (higher, hard)
