"""Failpoints: named places at which a test may stop a router, between two steps that are not atomic.

The name is that of etcd. In production nothing happens at any of them.
"""

from enum import Enum


class Failpoint(Enum):
    """The place in the life of a task."""

    SUBMITTED = "submitted"
    """The task is on disk, and its submission is not acknowledged."""
    CLAIMED = "claimed"
    """The claim is on disk, and no runner has been called."""
    ENDED = "ended"
    """The result is on disk, and no event is published."""


class Failpoints:
    """The action at a failpoint: none, unless a test overrides it."""

    async def reach(self, point: Failpoint, task_id: str) -> None:
        """Called when the router reaches the place with this task."""
