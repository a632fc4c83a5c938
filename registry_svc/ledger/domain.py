"""What is asked of the book of memory, and what it answers."""

from dataclasses import dataclass
from datetime import datetime

from registry_svc.ledger.policy.device_memory import DeviceAccount
from registry_svc.ledger.policy.leases import Holder, Lease
from weft.gpu.snapshot import DeviceSnapshot, HostSnapshot, ProcessId, Source
from weft.kernel.request import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireRequest:
    """Somebody needs memory on the host that it sees."""

    request_id: str
    holder: Holder
    session_id: str
    """A runner's; empty for a program."""
    purpose: str
    sight: HostSnapshot
    size: int
    """Bytes, over all devices."""
    device_indexes: frozenset[int] = frozenset()
    """Empty: all of the host."""
    max_devices: int = 0
    """0: as many as it takes."""
    priority: Priority = Priority.NORMAL
    max_wait_seconds: float | None = None
    """None: the book's own limit, which is also the most."""
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseUse:
    """How one lease is used, says its holder."""

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
    sight: HostSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """What is left of a holder's leases."""

    lost_lease_ids: tuple[str, ...]
    watched: tuple[ProcessId, ...]
    """What the next sighting must say something about."""
    next_within_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What somebody in line waits for."""

    detail: str
    needed: int
    """Bytes."""
    free: int
    """Bytes, on the devices in question."""
    holders: tuple[str, ...]
    """Who holds the rest, by purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The memory."""

    lease: Lease
    seen: int | None
    """What its processes are seen to hold, in bytes; None: unknown."""
    unowned: bool = False
    """Whether no runner of the mesh answers for it: its holder is silent, or does not publish the model any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One device as last seen, and its book."""

    sight: DeviceSnapshot
    book: DeviceAccount


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """One host's devices, and who holds them."""

    host: str
    source: Source
    seen_at: datetime
    devices: tuple[DeviceMemory, ...]
    leases: tuple[Granted, ...]
    """In order of their fencing numbers."""
    waiting_count: int
