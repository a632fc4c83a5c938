"""What a chat costs in calls, which no load of the machine changes. See `bench/calls.py`."""

import tempfile
from pathlib import Path

import pytest

from bench.calls import count_calls, total
from bench.contender import WEFT

# It settles first, and counting makes a chat several times slower.
pytestmark = [pytest.mark.slow("starts a mesh"), pytest.mark.timeout(400)]

MOST = 2_860
"""Calls of Python and C functions per chat, in host and runner (CPython 3.11, `up.lock`). Only goes down.

Until c24cc08e it was 2,870 by a meter that also subtracted what a mesh does by itself after its start; that tree has
2,990 by this one."""
TOLERANCE = 1.03
"""Background tasks, and how the event loop divides its turns."""


def test_chat_makes_no_more_calls_than_recorded() -> None:
    # The path of a runner's socket is limited.
    with tempfile.TemporaryDirectory(prefix="calls-") as folder:
        found = count_calls(WEFT, Path(folder))

    assert set(found) == {"host", "runner"}
    assert total(found) <= MOST * TOLERANCE, {role: calls.packages().most_common(8) for role, calls in found.items()}
