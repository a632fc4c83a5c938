"""Everything about the book of memory that an operator can set."""

import math
from dataclasses import dataclass

from weft.kernel.errors import invalid_field

_MAY_BE_ZERO = frozenset({"device_margin_bytes", "reclaim_wait_seconds", "restart_grace_seconds"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerConfig:
    """Settings with their defaults. A value that makes no sense raises INVALID_ARGUMENT naming the field."""

    lease_time_to_live_seconds: float = 30.0
    """A lease that is not renewed for this long is orphaned; it is over when its memory has been seen back."""
    renew_interval_seconds: float = 5.0
    """How often holders renew their leases and say what they see."""
    watch_interval_seconds: float = 0.25
    """How often they do while somebody waits for memory on their host."""
    device_margin_bytes: int = 512 * 1024 * 1024
    """Memory of each device that is never booked: the driver needs some."""
    reclaim_wait_seconds: float = 2.0
    """How long memory that was given up may take to be seen back before another model is asked to give way."""
    max_wait_seconds: float = 300.0
    """Longest wait for memory."""
    max_leases: int = 10_000
    """Leases that may exist at once, in all of the mesh."""
    max_waiting: int = 256
    """Requests that may wait for memory on one host."""
    orphan_keep_seconds: float = 14_400.0
    """An orphaned lease on a host that nobody sees any more is forgotten after this long."""
    restart_grace_seconds: float = 90.0
    """For this long after a start no lease is orphaned: holders could not reach a registry that was away."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
                raise invalid_field(name, "must be a number greater than zero")
        if self.lease_time_to_live_seconds <= self.renew_interval_seconds:
            raise invalid_field("lease_time_to_live_seconds", "must be longer than renew_interval_seconds")
