"""Leases of accelerator memory and requests for it, as immutable values, and their transitions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum

from weft.gpu.snapshot import HostSnapshot, ProcessId, ProcessSnapshot, Source
from weft.kernel.requests.request_values import Priority

Shares = tuple[tuple[int, int], ...]
"""(device index, bytes), in device order."""


class HolderKind(IntEnum):
    """Kind of lease holder; numbers as in `registry.v1.LeaseHolder.Kind`."""

    RUNNER = 1
    PROGRAM = 2


class LeaseState(IntEnum):
    """State of a lease; numbers as in `registry.v1.Lease.State`."""

    HELD = 1
    RELEASING = 2
    ORPHANED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The holder of a lease."""

    kind: HolderKind
    name: str
    incarnation: str
    """Identifies one run of the holder's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The durable part of a lease."""

    id: str
    fencing_number: int
    request_id: str
    host: str
    holder: Holder
    purpose: str
    """The model name, or a program's text."""
    shares: Shares
    pinned: bool
    """As requested; the holder may change it later."""
    priority: Priority
    """Priority of the request."""
    created_at: datetime
    processes: tuple[ProcessId, ...] = ()
    """All processes that its holder has named, without those observed as ended when the list was last saved; sorted."""
    releasing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A grant and its current state."""

    grant: Grant
    state: LeaseState
    renewed: float
    """When its holder last renewed it, in monotonic seconds."""
    since: float | None = None
    """When it was released or orphaned, in monotonic seconds; None while it is held."""
    filled: bool = False
    """Whether its processes hold all the memory that they will use."""
    active_requests: int = 0
    priority: Priority = Priority.NORMAL
    """Priority of its last request."""
    pinned: bool = False
    last_used_at: datetime | None = None
    """None: not used yet."""
    named: frozenset[ProcessId] = frozenset()
    """The processes in its last renewal."""
    gone: frozenset[ProcessId] = frozenset()
    """Processes of `grant.processes` observed as ended; final, since a pid with its start time is never reused."""

    @property
    def remaining(self) -> frozenset[ProcessId]:
        """Processes that may still run."""
        return frozenset(self.grant.processes) - self.gone


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """A request for memory on one host."""

    key: str
    """Identifies the call; the same for every retry."""
    request_id: str
    holder: Holder
    purpose: str
    host: str
    size: int
    """Bytes over all devices."""
    device_indexes: frozenset[int] = frozenset()
    """Empty: all of the host."""
    max_devices: int = 0
    """0: as many as needed."""
    priority: Priority = Priority.NORMAL
    pinned: bool = False
    arrival: int = 0
    """Order of arrival; earlier requests have lower numbers."""
    deadline: float
    """When the wait ends, in monotonic seconds."""

    @property
    def queue_key(self) -> tuple[int, int]:
        """Position in the wait queue: lower goes first."""
        return self.priority, self.arrival

    def devices_among(self, indexes: Iterable[int]) -> frozenset[int]:
        """Returns the devices of a host that the request may use."""
        return self.device_indexes.intersection(indexes) if self.device_indexes else frozenset(indexes)


LOOKED_FOR_SECONDS = 10.0
"""How long released memory is observed at the short interval of waiting requests."""


def read_back(grant: Grant, now: float) -> Lease:
    """Returns a lease loaded after a restart of the registry, without its reported use."""
    return Lease(
        grant=grant,
        state=LeaseState.RELEASING if grant.releasing else LeaseState.HELD,
        renewed=now,
        since=now if grant.releasing else None,
        priority=grant.priority,
        pinned=grant.pinned,
    )


def is_orphaned(lease: Lease, now: float, time_to_live: float, grace_until: float) -> bool:
    """Whether its holder has been silent for too long. Times in monotonic seconds."""
    return lease.state is LeaseState.HELD and now >= max(lease.renewed + time_to_live, grace_until)


def orphaned(lease: Lease, now: float) -> Lease:
    """Returns the lease as orphaned."""
    return replace(lease, state=LeaseState.ORPHANED, since=now)


def renewed(lease: Lease, now: float) -> Lease:
    """Returns the lease as renewed; an orphaned one is held again."""
    return replace(lease, state=LeaseState.HELD, renewed=now, since=None)


def released(lease: Lease, now: float) -> Lease:
    """Returns the lease as released at `now`, even if it was orphaned before."""
    return replace(lease, grant=replace(lease.grant, releasing=True), state=LeaseState.RELEASING, since=now)


def with_gone(lease: Lease, processes: Iterable[ProcessSnapshot]) -> Lease:
    """Returns the lease with ended processes of an observation, which stay ended whatever later observations report.

    An ended process counts only once its memory is no longer listed.
    """
    ended = {each.process for each in processes if not each.alive and not _holds_memory(each)}
    gone = ended.intersection(lease.grant.processes) - lease.gone
    return replace(lease, gone=lease.gone | gone) if gone else lease


def processes_after(lease: Lease, named: frozenset[ProcessId]) -> tuple[ProcessId, ...]:
    """Returns the processes of a lease after a renewal with `named`.

    Processes that are no longer named stay until they are observed as ended, since they may still hold memory.
    """
    together = named | lease.remaining
    return tuple(sorted(together)) if together else lease.grant.processes


def is_over(lease: Lease, snapshot: HostSnapshot, seen: float, renew_interval: float) -> bool:
    """Whether a released or orphaned lease has ended, by an observation of its host that arrived at `seen`.

    The observation must be newer than the release and report every process as ended or without memory. A lease without
    processes stays for one renew interval, since the report of a new process may be in transit.
    """
    if lease.since is None or seen <= lease.since:
        return False
    if not lease.grant.processes:
        return seen >= lease.since + renew_interval
    by_id = {each.process: each for each in snapshot.processes}
    return all(_holds_nothing(lease, by_id.get(process), snapshot.source) for process in lease.remaining)


def is_fresh(lease: Lease, now: float) -> bool:
    """Whether its memory was just released, so that it is observed often for the next request."""
    return lease.since is not None and now - lease.since < LOOKED_FOR_SECONDS


def is_forgotten(lease: Lease, now: float, last_seen: float, keep_seconds: float) -> bool:
    """Whether the host was not observed for `keep_seconds`, so that no observation will end the lease."""
    return lease.since is not None and now - max(lease.since, last_seen) >= keep_seconds


def watched(leases: Sequence[Lease]) -> list[ProcessId]:
    """Returns the processes that the next observation must report on, sorted."""
    found: set[ProcessId] = set()
    for lease in leases:
        found |= lease.remaining - lease.named if lease.state is LeaseState.HELD else lease.remaining
    return sorted(found)


def _holds_nothing(lease: Lease, process: ProcessSnapshot | None, source: Source) -> bool:
    # An unreported process may hold memory.
    if process is None or _holds_memory(process):
        return False
    if not process.alive:
        return True
    if source is not Source.NVML or process.memory_unknown:
        return False
    # A running process that has not filled its share may do so soon.
    return lease.state is LeaseState.RELEASING or lease.filled


def _holds_memory(process: ProcessSnapshot) -> bool:
    return any(size for _, size in process.bytes_by_device)
