"""The wait queue for the memory of one host: which request is granted now, and which models are evicted."""

from collections.abc import Sequence
from dataclasses import dataclass

from registry_svc.ledger.policy.device_memory import HostAccount, choose, with_shares
from registry_svc.ledger.policy.eviction import Reclaim, next_victim
from registry_svc.ledger.policy.leases import Lease, MemoryRequest, Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlan:
    """Grants and evictions to do now."""

    grants: tuple[tuple[MemoryRequest, Shares], ...]
    evictions: tuple[tuple[MemoryRequest, Lease], ...]
    """The request, and the lease whose model is to be evicted for it."""


def plan_queue(
    account: HostAccount, leases: Sequence[Lease], queue: Sequence[MemoryRequest], reclaim: Reclaim
) -> QueuePlan:
    """Plan by priority, then by arrival. A request that must wait reserves its devices against all later ones."""
    devices, taken = account.devices, frozenset[int]()
    grants: list[tuple[MemoryRequest, Shares]] = []
    evictions: list[tuple[MemoryRequest, Lease]] = []
    for request in sorted(queue, key=lambda each: each.place):
        wanted = request.devices_among(devices)
        usable = {index: devices[index] for index in sorted(wanted - taken)}
        shares = choose(tuple(usable.values()), request.size, request.max_devices)
        if shares is not None:
            grants.append((request, shares))
            devices = with_shares(devices, shares)
            continue
        victim = next_victim(request, usable, account, leases, reclaim)
        if victim is not None and victim.grant.id not in {lease.grant.id for _, lease in evictions}:
            evictions.append((request, victim))
        taken |= wanted
    return QueuePlan(grants=tuple(grants), evictions=tuple(evictions))
