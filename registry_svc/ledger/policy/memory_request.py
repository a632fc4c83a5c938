"""Somebody who waits for memory."""

from collections.abc import Iterable
from dataclasses import dataclass

from registry_svc.ledger.policy.leases import Holder
from weft.kernel.request import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A request for memory on one host."""

    key: str
    """The same on every repeat of one call, and nobody else's."""
    request_id: str
    holder: Holder
    purpose: str
    host: str
    size: int
    """Bytes, over all devices."""
    device_indexes: frozenset[int] = frozenset()
    """Empty: all of the host."""
    max_devices: int = 0
    """0: as many as it takes."""
    priority: Priority = Priority.NORMAL
    pinned: bool = False
    arrival: int = 0
    """Who came first has the lower one."""
    deadline: float
    """When it gives up, monotonic seconds."""

    @property
    def place(self) -> tuple[int, int]:
        """Its place in line: lower ones go first."""
        return self.priority, self.arrival

    def devices_among(self, indexes: Iterable[int]) -> frozenset[int]:
        """Those of a host's devices that it may be on."""
        return self.device_indexes.intersection(indexes) if self.device_indexes else frozenset(indexes)
