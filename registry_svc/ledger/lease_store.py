"""The store port of the book of memory: what must outlive the registry process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from registry_svc.ledger.policy.leases import Grant
from weft.gpu.sighting import ProcessId


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLedger:
    """Everything on disk."""

    grants: tuple[Grant, ...] = ()
    """In order of their fencing numbers."""
    last_fencing_number: int = 0
    """The highest that was ever given out, to whomever; 0: none."""


class LeaseStore(Protocol):
    """Where leases are kept, from their grant until they are over.

    Every write is one transaction that is on disk when the call returns. All methods raise SERVICE_UNAVAILABLE when
    the database fails; then nothing of the write has happened, unless the acknowledgement of its commit was lost.
    """

    async def load(self) -> StoredLedger:
        """Everything there is."""
        ...

    async def grant(self, grant: Grant) -> None:
        """Keep a new lease, and that its fencing number has been given out: it never comes again."""
        ...

    async def save_releasing(self, lease_ids: Sequence[str]) -> None:
        """Keep that these were given up; one that is not there is passed over."""
        ...

    async def save_processes(self, lease_id: str, processes: Sequence[ProcessId]) -> None:
        """Keep whose memory a lease's is; one that is not there is passed over."""
        ...

    async def remove(self, lease_ids: Sequence[str]) -> None:
        """Forget leases that are over; one that is not there is passed over."""
        ...
