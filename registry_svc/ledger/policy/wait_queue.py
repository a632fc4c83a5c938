"""The line for the memory of one host: who gets it now, and who must be asked to give way."""

from collections.abc import Sequence
from dataclasses import dataclass

from registry_svc.ledger.policy.device_memory import HostBook, choose, with_shares
from registry_svc.ledger.policy.eviction import Reclaim, next_victim
from registry_svc.ledger.policy.leases import Lease, Shares, Wish


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlan:
    """What is to be done now."""

    grants: tuple[tuple[Wish, Shares], ...]
    asks: tuple[tuple[Wish, Lease], ...]
    """For whom, and whom."""


def plan_line(book: HostBook, leases: Sequence[Lease], line: Sequence[Wish], reclaim: Reclaim) -> LinePlan:
    """By priority, then by arrival. Who must wait keeps everybody after it off all devices that it may be on."""
    devices, taken = book.devices, frozenset[int]()
    grants: list[tuple[Wish, Shares]] = []
    asks: list[tuple[Wish, Lease]] = []
    for wish in sorted(line, key=lambda each: each.place):
        wanted = wish.devices_among(devices)
        usable = {index: devices[index] for index in sorted(wanted - taken)}
        shares = choose(tuple(usable.values()), wish.size, wish.max_devices)
        if shares is not None:
            grants.append((wish, shares))
            devices = with_shares(devices, shares)
            continue
        victim = next_victim(wish, usable, book, leases, reclaim)
        if victim is not None and victim.grant.id not in {lease.grant.id for _, lease in asks}:
            asks.append((wish, victim))
        taken |= wanted
    return LinePlan(grants=tuple(grants), asks=tuple(asks))
