"""Memory that is being freed for the requests that wait, the next model to evict for them, and the order of grants."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from registry_svc.ledger.policy.device_memory import (
    DeviceAccount,
    HostAccount,
    changed,
    choose,
    with_shares,
    without,
)
from registry_svc.ledger.policy.leases import HolderKind, Lease, LeaseState, MemoryRequest, Shares
from weft.gpu.eviction import NEVER, Standing, victims

REFUSAL_KEPT_SECONDS = 5.0
"""Time before a runner that refused an eviction is asked again; long enough to try all other runners first."""


class EvictionState(Enum):
    """State of an eviction attempt."""

    PENDING = auto()
    GIVEN_UP = auto()
    REFUSED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionAttempt:
    """A request to a runner to give up a lease."""

    lease_id: str
    state: EvictionState
    at: float
    """When it was sent or, if answered, when it was answered; monotonic seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """Memory that is being freed on a host. All times in monotonic seconds."""

    attempts: Mapping[str, EvictionAttempt]
    """By lease id."""
    wait_seconds: float
    """How long released memory may take to be observed as free."""
    look_seconds: float
    """How long the first observation after a release may take."""
    seen: float
    """When the host was last observed."""
    now: float

    def is_going(self, lease: Lease) -> bool:
        """Whether a lease's memory is expected to be free soon."""
        if lease.state is LeaseState.RELEASING and lease.since is not None:
            look_seconds = self.look_seconds if self.seen <= lease.since else 0.0
            return self.now - lease.since < self.wait_seconds + look_seconds
        attempt = self.attempts.get(lease.grant.id)
        return attempt is not None and (attempt.state is EvictionState.PENDING or self._just_given_up(attempt))

    def may_be_evicted(self, lease: Lease) -> bool:
        """Whether the holder has not refused recently; agreeing without releasing counts as a refusal."""
        attempt = self.attempts.get(lease.grant.id)
        if attempt is None:
            return True
        agreed = self.wait_seconds if attempt.state is EvictionState.GIVEN_UP else 0.0
        return attempt.state is not EvictionState.PENDING and self.now - attempt.at >= REFUSAL_KEPT_SECONDS + agreed

    def _just_given_up(self, attempt: EvictionAttempt) -> bool:
        return attempt.state is EvictionState.GIVEN_UP and self.now - attempt.at < self.wait_seconds


def next_victim(
    request: MemoryRequest,
    usable: Mapping[int, DeviceAccount],
    account: HostAccount,
    leases: Sequence[Lease],
    reclaim: Reclaim,
) -> Lease | None:
    """Returns the lease to evict now so that `request` fits on `usable`; None: none, or not yet.

    Evicts nothing while an earlier eviction may still free memory, or if the request would not fit even after evicting
    all candidates.
    """
    going = [lease for lease in leases if reclaim.is_going(lease)]
    freed = without(usable, account, [lease.grant.id for lease in going])
    if _fits(freed, request) or any(_was_requested(lease, frozenset(usable), reclaim) for lease in going):
        return None
    on_their_way = {lease.grant.id for lease in going}
    able = [
        lease
        for lease in leases
        if lease.grant.id not in on_their_way
        and _may_be_evicted(lease, request)
        and _touches(lease, frozenset(usable))
        and reclaim.may_be_evicted(lease)
    ]
    found = victims(
        able,
        freed,
        standing=_standing,
        fits=lambda devices: _fits(devices, request),
        freed=lambda devices, lease, sign: changed(devices, account.takes[lease.grant.id], sign=-sign),
    )
    return found[0] if found else None


def _fits(devices: Mapping[int, DeviceAccount], request: MemoryRequest) -> bool:
    return choose(tuple(devices.values()), request.size, request.max_devices) is not None


def _was_requested(lease: Lease, devices: frozenset[int], reclaim: Reclaim) -> bool:
    return lease.grant.id in reclaim.attempts and _touches(lease, devices)


def _may_be_evicted(lease: Lease, request: MemoryRequest) -> bool:
    is_loaded = lease.grant.holder.kind is HolderKind.RUNNER and lease.state is LeaseState.HELD and lease.filled
    return is_loaded and _standing(lease).may_leave(request.priority)


def _standing(lease: Lease) -> Standing:
    return Standing(
        name=lease.grant.purpose,
        priority=lease.priority,
        last_used_at=NEVER if lease.last_used_at is None else lease.last_used_at.timestamp(),
        # A drained model counts as used until its runner's next renewal.
        in_use=lease.active_requests > 0,
        pinned=lease.pinned,
    )


def _touches(lease: Lease, devices: frozenset[int]) -> bool:
    return any(index in devices for index, _ in lease.grant.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlan:
    """Grants and evictions to make now."""

    grants: tuple[tuple[MemoryRequest, Shares], ...]
    evictions: tuple[tuple[MemoryRequest, Lease], ...]
    """Requests, and the lease to evict for each."""


def plan_queue(
    account: HostAccount, leases: Sequence[Lease], queue: Sequence[MemoryRequest], reclaim: Reclaim
) -> QueuePlan:
    """Plans by priority, then by arrival. A request that must wait reserves its devices against later ones."""
    devices, taken = account.devices, frozenset[int]()
    grants: list[tuple[MemoryRequest, Shares]] = []
    evictions: list[tuple[MemoryRequest, Lease]] = []
    for request in sorted(queue, key=lambda each: each.queue_key):
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
