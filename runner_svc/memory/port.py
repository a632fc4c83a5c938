"""The memory port: the calls of an instance to the ledger of accelerator memory, and the forecast of loads."""

from collections.abc import Callable
from typing import Protocol

from runner_svc.policy.load_plan import LoadPlan
from runner_svc.policy.memory_estimate import MemoryEstimate
from weft.api.registry.v1.lease_pb2 import Lease
from weft.api.registry.v1.lease_service_pb2 import AcquireLeaseRequest, LeaseUse
from weft.gpu.snapshot import ProcessId

OnWaiting = Callable[[str], None]
"""Called with a status text of the wait whenever it changes."""


def leased_bytes(lease: Lease) -> int:
    """Returns the bytes of a lease over all devices."""
    return sum(share.bytes for share in lease.shares)


class MemoryUser(Protocol):
    """The holder of a lease."""

    def processes(self) -> tuple[ProcessId, ...]:
        """Returns the processes that hold the memory of the lease."""
        ...

    def memory_use(self) -> LeaseUse:
        """Returns the present use of the lease, without the lease and its processes."""
        ...

    def note_lease_lost(self, why: str) -> None:
        """The lease was lost: every process that uses it must be ended immediately."""
        ...

    def note_memory_seen(self, seen_bytes: int | None) -> None:
        """Record the memory that its processes were observed to hold; None: unknown."""
        ...


class MemoryLedger:
    """The ledger of one host's accelerator memory, as one runner uses it.

    This class itself is that of a host without devices, where every request is granted without a lease. Leases are
    read-only.
    """

    hides_devices = True
    """Whether other devices than those of its lease are hidden from an engine; False for declared devices, which no
    driver knows. Known once a lease was granted."""

    async def acquire(self, wanted: AcquireLeaseRequest, user: MemoryUser, on_waiting: OnWaiting) -> Lease | None:
        """Wait for a lease, which is renewed from then on; None: this host has no devices, and nothing is leased.

        `wanted` says for which model (`purpose`), how much, at which priority, and whether it is pinned.

        Raises INSUFFICIENT_MEMORY when the memory is never available or the wait timed out, SERVICE_UNAVAILABLE when
        the ledger was unreachable for as long. A cancelled caller holds nothing.
        """
        del wanted, user, on_waiting
        return None

    def is_good(self, grant: Lease) -> bool:
        """Whether a lease is certainly valid, by the local clock alone."""
        del grant
        return True

    def note_change(self) -> None:
        """Report the use of the leases to the ledger now."""

    def release(self, grant: Lease) -> None:
        """Release a lease whose processes have ended. Returns immediately and never fails, also for a lost lease."""


class MemoryForecast:
    """The memory forecast for loads of one model. This class itself knows nothing."""

    async def expect(self, plan: LoadPlan) -> MemoryEstimate | None:
        """Returns the expected memory of a load by this plan; None: unknown. Never raises."""
        del plan
        return None

    async def context_within(self, plan: LoadPlan, budget_bytes: int) -> int | None:
        """Returns the largest context of one slot that fits the budget; None: unknown, or none."""
        del plan, budget_bytes
        return None

    def note_taken(self, plan: LoadPlan, taken_bytes: int) -> None:
        """Learn the measured memory of a load by this plan."""
