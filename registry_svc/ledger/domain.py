"""Requests to the VRAM ledger, and its answers."""

from dataclasses import dataclass
from datetime import datetime

from registry_svc.ledger.policy.leases import Holder, Lease
from weft.gpu.snapshot import HostSnapshot, ProcessId
from weft.kernel.request import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireRequest:
    """A validated AcquireLease: a holder needs memory on its host."""

    request_id: str
    holder: Holder
    session_id: str
    """A runner's; empty for a program."""
    purpose: str
    snapshot: HostSnapshot
    size: int
    """Bytes, over all devices."""
    device_indexes: frozenset[int] = frozenset()
    """Empty: all of the host."""
    max_devices: int = 0
    """0: as many as it takes."""
    priority: Priority = Priority.NORMAL
    max_wait_seconds: float | None = None
    """None: the limit of the configuration, which also caps it."""
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseUse:
    """How a lease is used, as reported by its holder."""

    lease_id: str
    fencing_number: int
    processes: frozenset[ProcessId] = frozenset()
    filled: bool = False
    active_requests: int = 0
    priority: Priority = Priority.NORMAL
    pinned: bool = False
    last_used_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """A holder is there, uses its leases so, and sees this."""

    holder: Holder
    session_id: str
    uses: tuple[LeaseUse, ...]
    snapshot: HostSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """The answer to a renewal."""

    lost_lease_ids: tuple[str, ...]
    watched: tuple[ProcessId, ...]
    """Processes that the next observation must report on."""
    next_within_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The memory."""

    lease: Lease
    seen: int | None
    """Memory that its processes were observed to hold, in bytes; None: unknown."""
    unowned: bool = False
    """Whether no runner of the mesh answers for it: its holder is silent, or does not publish the model any more."""
