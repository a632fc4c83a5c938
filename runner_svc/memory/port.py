"""The memory port: an instance's calls to the ledger of accelerator memory, and the forecast of loads."""

from collections.abc import Callable
from typing import Protocol

from runner_svc.policy.load_options import LoadPlan
from runner_svc.policy.memory_estimate import MemoryEstimate
from weft.api.registry.v1.lease_pb2 import Lease
from weft.api.registry.v1.lease_service_pb2 import AcquireLeaseRequest, LeaseUse
from weft.gpu.snapshot import ProcessId

OnWaiting = Callable[[str], None]
"""Called with a status text whenever the wait's status changes."""


def leased_bytes(lease: Lease) -> int:
    """Returns the bytes of a lease over all devices."""
    return sum(share.bytes for share in lease.shares)


class MemoryUser(Protocol):
    """The holder of a lease."""

    def processes(self) -> tuple[ProcessId, ...]:
        """Returns the processes that hold the leased memory."""
        ...

    def memory_use(self) -> LeaseUse:
        """Returns the current use of the lease, without the lease and its processes."""
        ...

    def note_lease_lost(self, why: str) -> None:
        """Reports that the lease was lost: every process that uses it must be ended immediately."""
        ...

    def note_memory_seen(self, seen_bytes: int | None) -> None:
        """Records the observed memory of its processes; None: unknown."""
        ...


class MemoryLedger:
    """The ledger of one host's accelerator memory, as used by one runner.

    This base class is for a host without devices: every request is granted without a lease. Leases are read-only.
    """

    hides_devices = True
    """Whether devices outside its lease are hidden from an engine; False for declared devices, which no driver knows.
    Known once a lease was granted."""

    async def acquire(self, wanted: AcquireLeaseRequest, user: MemoryUser, on_waiting: OnWaiting) -> Lease | None:
        """Waits for a lease, which is renewed automatically; None: this host has no devices, so nothing is leased.

        `wanted`: the model (`purpose`), the amount, the priority, and whether it is pinned.

        Raises INSUFFICIENT_MEMORY if the memory is never available or the wait timed out, SERVICE_UNAVAILABLE if the
        ledger was unreachable for that long. A cancelled caller holds nothing.
        """
        del wanted, user, on_waiting
        return None

    def is_good(self, grant: Lease) -> bool:
        """Whether a lease is certainly valid, by the local clock alone."""
        del grant
        return True

    def note_change(self) -> None:
        """Reports the use of the leases to the ledger now."""

    def release(self, grant: Lease) -> None:
        """Releases a lease after its processes have ended. Returns immediately; never fails, even for a lost lease."""


class MemoryForecast:
    """The memory forecast for a model's loads. This base class knows nothing."""

    async def expect(self, plan: LoadPlan) -> MemoryEstimate | None:
        """Returns the expected memory of a load by this plan; None: unknown. Never raises."""
        del plan
        return None

    async def context_within(self, plan: LoadPlan, budget_bytes: int) -> int | None:
        """Returns the largest context of one slot that fits the budget; None: unknown, or none."""
        del plan, budget_bytes
        return None

    def note_taken(self, plan: LoadPlan, taken_bytes: int) -> None:
        """Records the measured memory of a load by this plan."""
