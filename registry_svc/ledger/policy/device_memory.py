"""Chooses the devices of a lease, and the bytes on each."""

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
    """Memory that is never booked."""
    booked: int = 0
    """Memory of leases in any state."""
    held: int = 0
    """Sum over leases of the larger of booked and observed memory."""
    foreign: int | None = None
    """Memory held by processes without a lease; None: unknown."""

    @property
    def capacity(self) -> int:
        """Maximum memory that leases may book."""
        return max(0, self.total - self.margin)

    @property
    def free(self) -> int:
        """Memory that a new lease could get now."""
        by_booking = self.capacity - self.booked
        by_observation = by_booking if self.foreign is None else self.capacity - self.foreign - self.held
        return max(0, min(by_booking, by_observation))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAccount:
    """The memory accounts of a host's devices, and the share of each lease."""

    devices: Mapping[int, DeviceAccount]
    takes: Mapping[str, tuple[tuple[int, int, int], ...]]
    """By lease id: (device index, booked bytes, held bytes)."""
    seen: Mapping[str, int | None]
    """By lease id: observed bytes of its processes; None: unknown."""


def host_account(snapshot: HostSnapshot, leases: Sequence[Lease], margin: int) -> HostAccount:
    """Returns the account of a host with its leases. A lease on a missing device takes nothing."""
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
        books = changed(books, taken, sign=1)
    known = {lease_id: None if each is None else sum(each.values()) for lease_id, each in seen.items()}
    if all(device.used_bytes is None for device in snapshot.devices):
        known = dict.fromkeys(known, None)
    return HostAccount(devices=books, takes=takes, seen=known)


def without(
    devices: Mapping[int, DeviceAccount], account: HostAccount, lease_ids: Iterable[str]
) -> Mapping[int, DeviceAccount]:
    """Returns the devices without these leases."""
    for lease_id in lease_ids:
        devices = changed(devices, account.takes[lease_id], sign=-1)
    return devices


def with_shares(devices: Mapping[int, DeviceAccount], shares: Shares) -> Mapping[int, DeviceAccount]:
    """Returns the devices with an additional lease that holds no memory yet."""
    return changed(devices, [(index, size, size) for index, size in shares], sign=1)


def changed(
    devices: Mapping[int, DeviceAccount], taken: Iterable[tuple[int, int, int]], *, sign: int
) -> dict[int, DeviceAccount]:
    """Returns the devices with (sign 1) or without (-1) what a lease takes of them."""
    found = dict(devices)
    for index, booked, held in taken:
        if (device := found.get(index)) is not None:
            found[index] = replace(device, booked=device.booked + sign * booked, held=device.held + sign * held)
    return found


def _taken(shares: Shares, seen: Mapping[int, int]) -> Iterable[tuple[int, int, int]]:
    booked = dict(shares)
    for index in sorted({*booked, *seen}):
        share = booked.get(index, 0)
        yield index, share, max(share, seen.get(index, 0))


def _seen_by_device(lease: Lease, by_id: Mapping[ProcessId, ProcessSnapshot]) -> dict[int, int] | None:
    """Returns the memory of a lease's processes by device; None: unknown."""
    sights = [snapshot for process in lease.grant.processes if (snapshot := by_id.get(process)) is not None]
    # An unlisted process holds nothing. But if none of a filled lease's is listed, they cannot be observed at all:
    # in containers the driver's library lists none.
    if any(each.alive and each.memory_unknown for each in sights) or (lease.filled and not sights):
        return None
    held: dict[int, int] = defaultdict(int)
    for each in sights:
        # Memory may still be listed shortly after its process has ended.
        for index, size in each.bytes_by_device:
            held[index] += size
    return dict(held)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holdings:
    """Used bytes by device and kind of holder."""

    explained: Mapping[int, int]
    """Memory of observed processes, and of filled leases with processes that cannot be observed."""
    foreign: Mapping[int, int]
    """Memory of observed processes without a lease."""
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
        # A lease that is still loading may hold any part of its share. That part counts as foreign until the lease is
        # filled, which temporarily books too much rather than too little.
        for index, size in lease.grant.shares if lease.filled else ():
            explained[index] += size
    are_all_seen = not unseen and not any(process.alive and process.memory_unknown for process in snapshot.processes)
    return _Holdings(explained=explained, foreign=foreign, are_all_seen=are_all_seen)


def _foreign(device: DeviceSnapshot, holdings: _Holdings, margin: int) -> int | None:
    """Returns the memory that processes without a lease hold on a device; None: unknown."""
    if device.used_bytes is None:
        return None
    # The margin covers memory of the driver, which no process shows. More than the margin is held by processes that
    # cannot be observed.
    unexplained = device.used_bytes - holdings.explained.get(device.index, 0)
    allowance = margin if holdings.are_all_seen else 0
    return holdings.foreign.get(device.index, 0) + max(0, unexplained - allowance)


def choose(devices: Sequence[DeviceAccount], size: int, max_devices: int) -> Shares | None:
    """Returns shares that add up to exactly `size`, in device order; None if there is not enough room now.

    Prefers a single device, the fullest that fits, to keep large gaps for large models. Otherwise uses as few devices
    as possible, those with the most room, with shares in proportion to their room. `max_devices` 0: any number.
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
    """Returns the capacity of these devices when empty, of at most `max_devices` (0: any number)."""
    capacities = sorted((device.capacity for device in devices), reverse=True)
    return sum(capacities[: max_devices or len(capacities)])


def _fullest(device: DeviceAccount) -> tuple[int, int]:
    return device.free, device.index


def _split(devices: Sequence[DeviceAccount], size: int, room: int) -> Shares:
    """Splits `size` in proportion to room; remaining bytes go to the first devices.

    No device gets more than its room: if `size` is less than `room`, every proportional share leaves at least a byte,
    and if they are equal, no bytes remain.
    """
    shares = [size * device.free // room for device in devices]
    for position in range(size - sum(shares)):
        shares[position] += 1
    return tuple((device.index, share) for device, share in zip(devices, shares, strict=True))
