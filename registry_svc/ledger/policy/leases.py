"""The book of accelerator memory: who holds what on one host, and what its devices have left. Nothing but values.

Two figures bound what a device has left, and the lower one counts. By booking: its memory without the margin and
without all that leases booked. By sight: without the margin, without what processes hold that have no lease, and
without what each lease booked or is seen to hold, whichever is more. Where use is unknown, booking alone counts.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum

from weft.gpu.sighting import DeviceSight, HostSight, ProcessId, ProcessSight
from weft.kernel.request import Priority

Shares = tuple[tuple[int, int], ...]
"""(device index, bytes), in order of the devices."""


class HolderKind(IntEnum):
    """What holds a lease; numbers as in `registry.v1.LeaseHolder.Kind`."""

    RUNNER = 1
    PROGRAM = 2


class LeaseState(IntEnum):
    """Where a lease is in its life; numbers as in `registry.v1.Lease.State`."""

    HELD = 1
    RELEASING = 2
    ORPHANED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lease."""

    kind: HolderKind
    name: str
    incarnation: str
    """One life of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What is durable of a lease."""

    id: str
    fencing_number: int
    request_id: str
    host: str
    holder: Holder
    purpose: str
    """A model's name, or a program's words."""
    shares: Shares
    pinned: bool
    """As asked for; its holder may say otherwise later."""
    priority: Priority
    """Of whoever asked."""
    created_at: datetime
    processes: tuple[ProcessId, ...] = ()
    """All that its holder ever named and that were not seen to be gone before it named others; in order."""
    releasing: bool = False
    """Whether its holder gave it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A grant, and what is known of it now."""

    grant: Grant
    state: LeaseState
    renewed: float
    """When its holder was last heard of, monotonic seconds."""
    since: float | None = None
    """When it was given up or orphaned, monotonic seconds; None while it is held."""
    filled: bool = False
    """Whether what its processes hold is all that they will take."""
    active_requests: int = 0
    priority: Priority = Priority.NORMAL
    """Of the last request that it worked for."""
    pinned: bool = False
    last_used_at: datetime | None = None
    """None: not yet."""
    named: frozenset[ProcessId] = frozenset()
    """The processes of its holder's last word."""
    gone: frozenset[ProcessId] = frozenset()
    """Those of `grant.processes` that somebody saw to have ended: for good, as a process id with its start is."""

    @property
    def remaining(self) -> frozenset[ProcessId]:
        """Its processes that may still be there."""
        return frozenset(self.grant.processes) - self.gone


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBook:
    """The book of one device. All in bytes."""

    index: int
    total: int
    margin: int
    """Never booked."""
    booked: int = 0
    """By leases in whatever state."""
    held: int = 0
    """For each lease what it booked or is seen to hold, whichever is more."""
    foreign: int | None = None
    """Held by processes without a lease; None: unknown."""

    @property
    def capacity(self) -> int:
        """All that leases may ever book."""
        return max(0, self.total - self.margin)

    @property
    def free(self) -> int:
        """What a new lease could get now."""
        by_booking = self.capacity - self.booked
        by_sight = by_booking if self.foreign is None else self.capacity - self.foreign - self.held
        return max(0, min(by_booking, by_sight))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBook:
    """The books of one host's devices, and what each lease takes of them."""

    devices: Mapping[int, DeviceBook]
    takes: Mapping[str, tuple[tuple[int, int, int], ...]]
    """By lease id: (device index, booked bytes, held bytes)."""
    seen: Mapping[str, int | None]
    """By lease id: what its processes are seen to hold, in bytes; None: unknown."""


def open_book(sight: HostSight, leases: Sequence[Lease], margin: int) -> HostBook:
    """The books of a host as it was seen last, with its leases. A lease on a device that is gone takes nothing."""
    by_id = {each.process: each for each in sight.processes}
    seen = {lease.grant.id: _seen_by_device(lease, by_id) for lease in leases}
    takes = {lease.grant.id: tuple(_taken(lease.grant.shares, seen[lease.grant.id] or {})) for lease in leases}
    holdings = _holdings(sight, leases, seen)
    books = {
        device.index: DeviceBook(
            index=device.index, total=device.total_bytes, margin=margin, foreign=_foreign(device, holdings, margin)
        )
        for device in sight.devices
    }
    for taken in takes.values():
        books = _changed(books, taken, sign=1)
    known = {lease_id: None if each is None else sum(each.values()) for lease_id, each in seen.items()}
    if all(device.used_bytes is None for device in sight.devices):
        known = dict.fromkeys(known, None)
    return HostBook(devices=books, takes=takes, seen=known)


def without(devices: Mapping[int, DeviceBook], book: HostBook, lease_ids: Iterable[str]) -> Mapping[int, DeviceBook]:
    """The devices as they would be if these leases were over."""
    changed = devices
    for lease_id in lease_ids:
        changed = _changed(changed, book.takes[lease_id], sign=-1)
    return changed


def with_again(devices: Mapping[int, DeviceBook], book: HostBook, lease_id: str) -> Mapping[int, DeviceBook]:
    """The devices as they would be if a lease that `without` left out were there after all."""
    return _changed(devices, book.takes[lease_id], sign=1)


def with_shares(devices: Mapping[int, DeviceBook], shares: Shares) -> Mapping[int, DeviceBook]:
    """The devices with one more lease, whose processes hold nothing yet."""
    return _changed(devices, [(index, size, size) for index, size in shares], sign=1)


def _changed(
    devices: Mapping[int, DeviceBook], taken: Iterable[tuple[int, int, int]], *, sign: int
) -> dict[int, DeviceBook]:
    changed = dict(devices)
    for index, booked, held in taken:
        if (device := changed.get(index)) is not None:
            changed[index] = replace(device, booked=device.booked + sign * booked, held=device.held + sign * held)
    return changed


def _taken(shares: Shares, seen: Mapping[int, int]) -> Iterable[tuple[int, int, int]]:
    booked = dict(shares)
    for index in sorted({*booked, *seen}):
        share = booked.get(index, 0)
        yield index, share, max(share, seen.get(index, 0))


def _seen_by_device(lease: Lease, by_id: Mapping[ProcessId, ProcessSight]) -> dict[int, int] | None:
    """What a lease's processes hold on each device; None: unknown."""
    sights = [sight for process in lease.grant.processes if (sight := by_id.get(process)) is not None]
    # A process that is not named holds nothing. But where not one of a filled lease's is named, they cannot be seen
    # at all: inside of containers the driver's library lists none.
    if any(each.alive and each.memory_unknown for each in sights) or (lease.filled and not sights):
        return None
    held: dict[int, int] = defaultdict(int)
    for each in sights:
        # Memory may be listed for a moment longer than its process lives.
        for index, size in each.bytes_by_device:
            held[index] += size
    return dict(held)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holdings:
    """Who holds what is in use, by device, in bytes."""

    explained: Mapping[int, int]
    """By processes that are seen, and by filled leases whose processes are not."""
    foreign: Mapping[int, int]
    """By processes that are seen and have no lease."""
    are_all_seen: bool


def _holdings(sight: HostSight, leases: Sequence[Lease], seen: Mapping[str, dict[int, int] | None]) -> _Holdings:
    leased = {process for lease in leases for process in lease.grant.processes}
    explained: dict[int, int] = defaultdict(int)
    foreign: dict[int, int] = defaultdict(int)
    for process in sight.processes:
        for index, size in process.bytes_by_device:
            explained[index] += size
            foreign[index] += 0 if process.process in leased else size
    unseen = [lease for lease in leases if seen[lease.grant.id] is None]
    for lease in unseen:
        # One that is still loading may hold anything up to its share; what it holds already counts as foreign until
        # it is filled, which books too much for a while rather than too little.
        for index, size in lease.grant.shares if lease.filled else ():
            explained[index] += size
    are_all_seen = not unseen and not any(process.alive and process.memory_unknown for process in sight.processes)
    return _Holdings(explained=explained, foreign=foreign, are_all_seen=are_all_seen)


def _foreign(device: DeviceSight, holdings: _Holdings, margin: int) -> int | None:
    """What processes without a lease hold on a device; None: unknown."""
    if device.used_bytes is None:
        return None
    # The driver holds some memory for itself, which no process shows. The margin is there for that; more than it is
    # held by somebody who cannot be seen.
    unexplained = device.used_bytes - holdings.explained.get(device.index, 0)
    allowance = margin if holdings.are_all_seen else 0
    return holdings.foreign.get(device.index, 0) + max(0, unexplained - allowance)
