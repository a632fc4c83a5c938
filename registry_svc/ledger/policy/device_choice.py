"""On which devices a lease goes, and how much on each. All in bytes."""

from collections.abc import Sequence

from registry_svc.ledger.policy.leases import DeviceBook, Shares


def choose(devices: Sequence[DeviceBook], size: int, max_devices: int) -> Shares | None:
    """Shares that add up to exactly `size`, in order of the devices; None: there is no room now.

    One device that holds it all is preferred, of several the fullest: large gaps stay for large models. Else as few
    devices as it takes, those with most room, each with a share in proportion to its room. `max_devices` 0: any number.
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


def largest_lease(devices: Sequence[DeviceBook], max_devices: int) -> int:
    """What these devices could hold if they were empty, split over at most `max_devices`; 0 of them: any number."""
    capacities = sorted((device.capacity for device in devices), reverse=True)
    return sum(capacities[: max_devices or len(capacities)])


def _fullest(device: DeviceBook) -> tuple[int, int]:
    return device.free, device.index


def _split(devices: Sequence[DeviceBook], size: int, room: int) -> Shares:
    """In proportion to room; bytes that do not divide go to the first devices.

    None gets more than its room: where `size` is less than `room`, every proportional share leaves a byte at least, and
    where they are equal nothing is left to give.
    """
    shares = [size * device.free // room for device in devices]
    for position in range(size - sum(shares)):
        shares[position] += 1
    return tuple((device.index, share) for device, share in zip(devices, shares, strict=True))
