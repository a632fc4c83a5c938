"""On which devices a lease goes, and how much on each. All in bytes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from registry_svc.ledger.policy.leases import Lease, Shares
from weft.gpu.snapshot import DeviceSnapshot, HostSnapshot, ProcessId, ProcessSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccount:
    """The memory account of one device. All in bytes."""

    index: int
    total: int
    margin: int
    """Never booked."""
    booked: int = 0
    """By leases in whatever state."""
    held: int = 0
    """Sum over leases of the larger of booked and observed memory."""
    foreign: int | None = None
    """Held by processes without a lease; None: unknown."""

    @property
    def capacity(self) -> int:
        """Memory that leases may book at most."""
        return max(0, self.total - self.margin)

    @property
    def free(self) -> int:
        """Memory that a new lease could get now."""
        by_booking = self.capacity - self.booked
        by_observation = by_booking if self.foreign is None else self.capacity - self.foreign - self.held
        return max(0, min(by_booking, by_observation))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAccount:
    """The memory accounts of one host's devices, and what each lease takes of them."""

    devices: Mapping[int, DeviceAccount]
    takes: Mapping[str, tuple[tuple[int, int, int], ...]]
    """By lease id: (device index, booked bytes, held bytes)."""
    seen: Mapping[str, int | None]
    """By lease id: memory that its processes were observed to hold, in bytes; None: unknown."""


def host_account(snapshot: HostSnapshot, leases: Sequence[Lease], margin: int) -> HostAccount:
    """Return the account of a host as last observed, with its leases. A lease on a missing device takes nothing."""
    by_id = {each.process: each for each in snapshot.processes}
    seen = {lease.grant.id: _seen_by_device(lease, by_id) for lease in leases}
    takes = {lease.grant.id: tuple(_taken(lease.grant.shares, seen[lease.grant.id] or {})) for lease in leases}
    holdings = _holdings(snapshot, leases, seen)
    books = {
        device.index: DeviceAccount(
            index=device.index, total=device.total_bytes, margin=margin, foreign=_foreign(device, holdings, margin)
        )
        for device in snapshot.devices
    }
    for taken in takes.values():
        books = _changed(books, taken, sign=1)
    known = {lease_id: None if each is None else sum(each.values()) for lease_id, each in seen.items()}
    if all(device.used_bytes is None for device in snapshot.devices):
        known = dict.fromkeys(known, None)
    return HostAccount(devices=books, takes=takes, seen=known)


def without(
    devices: Mapping[int, DeviceAccount], account: HostAccount, lease_ids: Iterable[str]
) -> Mapping[int, DeviceAccount]:
    """Return the devices as they would be without these leases."""
    changed = devices
    for lease_id in lease_ids:
        changed = _changed(changed, account.takes[lease_id], sign=-1)
    return changed


def with_again(
    devices: Mapping[int, DeviceAccount], account: HostAccount, lease_id: str
) -> Mapping[int, DeviceAccount]:
    """The devices as they would be if a lease that `without` left out were there after all."""
    return _changed(devices, account.takes[lease_id], sign=1)


def with_shares(devices: Mapping[int, DeviceAccount], shares: Shares) -> Mapping[int, DeviceAccount]:
    """Return the devices with one more lease, whose processes hold nothing yet."""
    return _changed(devices, [(index, size, size) for index, size in shares], sign=1)


def _changed(
    devices: Mapping[int, DeviceAccount], taken: Iterable[tuple[int, int, int]], *, sign: int
) -> dict[int, DeviceAccount]:
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


def _seen_by_device(lease: Lease, by_id: Mapping[ProcessId, ProcessSnapshot]) -> dict[int, int] | None:
    """Return what a lease's processes hold on each device; None: unknown."""
    sights = [snapshot for process in lease.grant.processes if (snapshot := by_id.get(process)) is not None]
    # A process that is not named holds nothing. But where not one of a filled lease's is named, they cannot be seen
    # at all: inside of containers the driver's library lists none.
    if any(each.alive and each.memory_unknown for each in sights) or (lease.filled and not sights):
        return None
    held: dict[int, int] = defaultdict(int)
    for each in sights:
        # Memory may be listed for a moment after its process has ended.
        for index, size in each.bytes_by_device:
            held[index] += size
    return dict(held)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holdings:
    """Memory in use by device, in bytes, by who holds it."""

    explained: Mapping[int, int]
    """Held by observed processes, and by filled leases whose processes cannot be observed."""
    foreign: Mapping[int, int]
    """By processes that are seen and have no lease."""
    are_all_seen: bool


def _holdings(snapshot: HostSnapshot, leases: Sequence[Lease], seen: Mapping[str, dict[int, int] | None]) -> _Holdings:
    leased = {process for lease in leases for process in lease.grant.processes}
    explained: dict[int, int] = defaultdict(int)
    foreign: dict[int, int] = defaultdict(int)
    for process in snapshot.processes:
        for index, size in process.bytes_by_device:
            explained[index] += size
            foreign[index] += 0 if process.process in leased else size
    unseen = [lease for lease in leases if seen[lease.grant.id] is None]
    for lease in unseen:
        # One that is still loading may hold anything up to its share; what it holds already counts as foreign until
        # it is filled, which books too much for a while rather than too little.
        for index, size in lease.grant.shares if lease.filled else ():
            explained[index] += size
    are_all_seen = not unseen and not any(process.alive and process.memory_unknown for process in snapshot.processes)
    return _Holdings(explained=explained, foreign=foreign, are_all_seen=are_all_seen)


def _foreign(device: DeviceSnapshot, holdings: _Holdings, margin: int) -> int | None:
    """Return what processes without a lease hold on a device; None: unknown."""
    if device.used_bytes is None:
        return None
    # The driver holds some memory for itself, which no process shows. The margin covers that; more than the margin is
    # held by processes that cannot be observed.
    unexplained = device.used_bytes - holdings.explained.get(device.index, 0)
    allowance = margin if holdings.are_all_seen else 0
    return holdings.foreign.get(device.index, 0) + max(0, unexplained - allowance)


def choose(devices: Sequence[DeviceAccount], size: int, max_devices: int) -> Shares | None:
    """Return shares that add up to exactly `size`, in order of the devices; None: not enough room now.

    A single device that fits is preferred, the fullest of several, so that large gaps stay for large models. Otherwise
    as few devices as possible, those with most room, each with a share in proportion to its room. `max_devices` 0: any
    number.
    """
    alone = min((device for device in devices if device.free >= size), key=_fullest, default=None)
    if alone is not None:
        return ((alone.index, size),)
    roomiest = sorted(devices, key=lambda device: (-device.free, device.index))[: max_devices or len(devices)]
    room = 0
    for count, device in enumerate(roomiest, start=1):
        room += device.free
        if room >= size:
            return _split(sorted(roomiest[:count], key=lambda each: each.index), size, room)
    return None


def largest_lease(devices: Sequence[DeviceAccount], max_devices: int) -> int:
    """Return what these devices could hold if they were empty, split over at most `max_devices` (0: any number)."""
    capacities = sorted((device.capacity for device in devices), reverse=True)
    return sum(capacities[: max_devices or len(capacities)])


def _fullest(device: DeviceAccount) -> tuple[int, int]:
    return device.free, device.index


def _split(devices: Sequence[DeviceAccount], size: int, room: int) -> Shares:
    """In proportion to room; bytes that do not divide go to the first devices.

    None gets more than its room: where `size` is less than `room`, every proportional share leaves a byte at least, and
    where they are equal nothing is left to give.
    """
    shares = [size * device.free // room for device in devices]
    for position in range(size - sum(shares)):
        shares[position] += 1
    return tuple((device.index, share) for device, share in zip(devices, shares, strict=True))
