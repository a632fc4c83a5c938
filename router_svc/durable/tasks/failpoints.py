"""Places at which a test may stop a router, so that what is not atomic is tried where it breaks.

etcd names its failpoints the same way. In production nothing happens at any of them.
"""

from enum import Enum
from typing import Protocol


class Failpoint(Enum):
    """Where."""

    SUBMITTED = "submitted"
    """The task is on disk, and its submitter does not know it yet."""
    CLAIMED = "claimed"
    """The claim is on disk, and no runner has been called."""
    ENDED = "ended"
    """The result is on disk, and nobody has been told."""


class Failpoints(Protocol):
    """What happens there."""

    async def reach(self, point: Failpoint, task_id: str) -> None:
        """The router is there with this task."""
        ...


class NoFailpoints:
    """Nothing happens."""

    async def reach(self, point: Failpoint, task_id: str) -> None:
        """See Failpoints.reach."""
