"""Leases of accelerator memory and requests for it, as immutable values, and what time and observations do to them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum

from weft.gpu.snapshot import HostSnapshot, ProcessId, ProcessSnapshot, Source
from weft.kernel.request import Priority

Shares = tuple[tuple[int, int], ...]
"""(device index, bytes), in order of the devices."""


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
    """A model's name, or free text of a program."""
    shares: Shares
    pinned: bool
    """As requested; its holder may change it later."""
    priority: Priority
    """Priority of the request."""
    created_at: datetime
    processes: tuple[ProcessId, ...] = ()
    """Every process its holder ever named that was not observed to have ended before others were named; in order."""
    releasing: bool = False
    """Whether its holder released it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A grant, and its present state."""

    grant: Grant
    state: LeaseState
    renewed: float
    """When its holder last renewed it, monotonic seconds."""
    since: float | None = None
    """When it was given up or orphaned, monotonic seconds; None while it is held."""
    filled: bool = False
    """Whether its processes hold all the memory that they will take."""
    active_requests: int = 0
    priority: Priority = Priority.NORMAL
    """Of the last request that it worked for."""
    pinned: bool = False
    last_used_at: datetime | None = None
    """None: not yet."""
    named: frozenset[ProcessId] = frozenset()
    """The processes that its holder named last."""
    gone: frozenset[ProcessId] = frozenset()
    """Those of `grant.processes` observed to have ended; final, as a pid with its start time is never reused."""

    @property
    def remaining(self) -> frozenset[ProcessId]:
        """Its processes that may still be there."""
        return frozenset(self.grant.processes) - self.gone


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """A request for memory on one host."""

    key: str
    """Identifies the call; the same on every repeat of it."""
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
    """Order of arrival; earlier requests have lower numbers."""
    deadline: float
    """When it gives up, monotonic seconds."""

    @property
    def place(self) -> tuple[int, int]:
        """Position in the wait queue: lower goes first."""
        return self.priority, self.arrival

    def devices_among(self, indexes: Iterable[int]) -> frozenset[int]:
        """Return the devices of a host that the request may use."""
        return self.device_indexes.intersection(indexes) if self.device_indexes else frozenset(indexes)


LOOKED_FOR_SECONDS = 10.0
"""How long released memory is observed at the short interval of waiting requests."""


def read_back(grant: Grant, now: float) -> Lease:
    """Return a lease loaded after a restart of the registry; reports of its use are lost."""
    return Lease(
        grant=grant,
        state=LeaseState.RELEASING if grant.releasing else LeaseState.HELD,
        renewed=now,
        since=now if grant.releasing else None,
        priority=grant.priority,
        pinned=grant.pinned,
    )


def is_orphaned(lease: Lease, now: float, time_to_live: float, grace_until: float) -> bool:
    """Whether its holder has been silent for too long. All in monotonic seconds."""
    return lease.state is LeaseState.HELD and now >= max(lease.renewed + time_to_live, grace_until)


def orphaned(lease: Lease, now: float) -> Lease:
    """Return a lease whose holder stopped renewing it, as orphaned."""
    return replace(lease, state=LeaseState.ORPHANED, since=now)


def renewed(lease: Lease, now: float) -> Lease:
    """Return a renewed lease; an orphaned one is held again."""
    return replace(lease, state=LeaseState.HELD, renewed=now, since=None)


def released(lease: Lease, now: float) -> Lease:
    """Return a released lease; the release counts from `now`, even if the holder was silent before."""
    return replace(lease, grant=replace(lease.grant, releasing=True), state=LeaseState.RELEASING, since=now)


def with_gone(lease: Lease, processes: Iterable[ProcessSnapshot]) -> Lease:
    """Return a lease after an observation: ended processes stay ended, whatever later observations report.

    A process that has ended while its memory is still listed does not count as ended yet.
    """
    ended = {each.process for each in processes if not each.alive and not _holds_memory(each)}
    gone = ended.intersection(lease.grant.processes) - lease.gone
    return replace(lease, gone=lease.gone | gone) if gone else lease


def processes_after(lease: Lease, named: frozenset[ProcessId]) -> tuple[ProcessId, ...]:
    """Return the processes of a lease after its holder named these.

    Processes that are no longer named stay until they are observed to have ended: they may still hold memory.
    """
    together = named | lease.remaining
    return tuple(sorted(together)) if together else lease.grant.processes


def is_over(lease: Lease, snapshot: HostSnapshot, seen: float, renew_interval: float) -> bool:
    """Whether a released or orphaned lease has ended, by an observation of its host that arrived at `seen`.

    The observation must be newer than the release and report every process as ended or without memory. Where no process
    was ever named, one may have started whose name is still on its way: the lease stays for one renew interval.
    """
    if lease.since is None or seen <= lease.since:
        return False
    if not lease.grant.processes:
        return seen >= lease.since + renew_interval
    by_id = {each.process: each for each in snapshot.processes}
    return all(_holds_nothing(lease, by_id.get(process), snapshot.source) for process in lease.remaining)


def is_fresh(lease: Lease, now: float) -> bool:
    """Whether its memory was released a moment ago, so that it is observed often for the next request."""
    return lease.since is not None and now - lease.since < LOOKED_FOR_SECONDS


def is_forgotten(lease: Lease, now: float, last_seen: float, keep_seconds: float) -> bool:
    """Whether the host was not observed for so long that no observation will end the lease."""
    return lease.since is not None and now - max(lease.since, last_seen) >= keep_seconds


def watched(leases: Sequence[Lease]) -> list[ProcessId]:
    """Return the processes that the next observation must report on, in order."""
    found: set[ProcessId] = set()
    for lease in leases:
        found |= lease.remaining - lease.named if lease.state is LeaseState.HELD else lease.remaining
    return sorted(found)


def _holds_nothing(lease: Lease, process: ProcessSnapshot | None, source: Source) -> bool:
    # A process that was not reported on may hold memory.
    if process is None or _holds_memory(process):
        return False
    if not process.alive:
        return True
    if source is not Source.NVML or process.memory_unknown:
        return False
    # A process that was not ended and has not filled its share may be about to.
    return lease.state is LeaseState.RELEASING or lease.filled


def _holds_memory(process: ProcessSnapshot) -> bool:
    return any(size for _, size in process.bytes_by_device)
