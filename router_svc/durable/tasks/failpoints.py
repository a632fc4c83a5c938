"""Failpoints (as in etcd): places between two non-atomic steps at which a test may stop a router.

In production they do nothing.
"""

from enum import Enum


class Failpoint(Enum):
    """A place in a task's life."""

    SUBMITTED = "submitted"
    """The task is on disk, but its submission is not acknowledged."""
    CLAIMED = "claimed"
    """The claim is on disk, but no runner has been called."""
    ENDED = "ended"
    """The result is on disk, but no event is published."""


class Failpoints:
    """The action at a failpoint: none, unless a test overrides it."""

    async def reach(self, point: Failpoint, task_id: str) -> None:
        """Called when the router reaches the failpoint with this task."""
