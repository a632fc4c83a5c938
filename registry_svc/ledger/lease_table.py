"""The table of leases and of the last observation of each host, in memory.

Durable facts are written to the store before they change here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from registry_svc.ledger.policy.device_memory import HostAccount, host_account
from registry_svc.ledger.policy.leases import (
    Holder,
    HolderKind,
    Lease,
    with_gone,
)
from weft.gpu.snapshot import HostSnapshot
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

IsDialOut = Callable[[str], bool]
"""By a runner's name: whether it is a dial-out runner, whose host name is unverified."""

MAX_HOSTS = 10_000
"""Hosts that are remembered at once. Far more than the mesh has runners on; programs need no session to name one."""

DEVICES_KEPT_SECONDS = 60.0
"""How long the devices of a host are remembered after a report without devices."""


def no_dial_out(_: str) -> bool:
    """See IsGuest: there are no guests."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenHost:
    """The last observation of a host."""

    snapshot: HostSnapshot
    seen: float
    """When it arrived, monotonic seconds."""
    seen_at: datetime
    by_dial_out: bool


class LeaseTable:
    """Leases by id and by host, and hosts as last seen."""

    def __init__(self, margin: int, host_keep_seconds: float, is_dial_out: IsDialOut = no_dial_out) -> None:
        """`host_keep_seconds`: how long a host without leases is remembered when no holder observes it."""
        self._margin = margin
        self._is_dial_out = is_dial_out
        self._host_keep_seconds = host_keep_seconds
        self._leases: dict[str, Lease] = {}
        self._on_host: dict[str, dict[str, None]] = {}
        self._hosts: dict[str, SeenHost] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._leases.values()))

    def lease(self, lease_id: str) -> Lease | None:
        """Return one lease; None: it has ended or never existed."""
        return self._leases.get(lease_id)

    def put(self, lease: Lease) -> None:
        """Add a lease, or replace its state."""
        self._leases[lease.grant.id] = lease
        self._on_host.setdefault(lease.grant.host, {})[lease.grant.id] = None

    def drop(self, lease: Lease) -> None:
        """Remove a lease that has ended."""
        del self._leases[lease.grant.id]
        there = self._on_host[lease.grant.host]
        del there[lease.grant.id]
        if not there:
            del self._on_host[lease.grant.host]

    def leases_on(self, host: str) -> tuple[Lease, ...]:
        """In order of their fencing numbers."""
        return tuple(self._leases[lease_id] for lease_id in self._on_host.get(host, ()))

    def host(self, name: str) -> SeenHost | None:
        """Return a host as last observed; None: not observed since the registry started."""
        return self._hosts.get(name)

    def host_names(self) -> list[str]:
        """Every host that was seen, in order."""
        return sorted(self._hosts)

    def see(self, holder: Holder, snapshot: HostSnapshot, now: float, now_utc: datetime) -> None:
        """Record what a holder observed. Raises TOO_MANY_RESOURCES when MAX_HOSTS are known.

        An observation by a dial-out runner is ignored on a host that a local holder observes or holds memory on: it
        could end leases of others.
        """
        known, by_dial_out = self._hosts.get(snapshot.host), self._is_of_dial_out(holder)
        if by_dial_out and self._is_seen_locally(snapshot.host, now):
            return
        if known is None and len(self._hosts) >= MAX_HOSTS:
            self.forget_hosts(now)
        if known is None and len(self._hosts) >= MAX_HOSTS:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES, f"the memory of {MAX_HOSTS} hosts is booked already, which is the most"
            )
        # A holder that sees no devices may run in a container without them, beside holders that do see them.
        if snapshot.devices or known is None or now - known.seen >= DEVICES_KEPT_SECONDS:
            self._hosts[snapshot.host] = SeenHost(snapshot=snapshot, seen=now, seen_at=now_utc, by_dial_out=by_dial_out)
        if any(not process.alive for process in snapshot.processes):
            for lease in self.leases_on(snapshot.host):
                self._leases[lease.grant.id] = with_gone(lease, snapshot.processes)

    def _is_of_dial_out(self, holder: Holder) -> bool:
        return holder.kind is HolderKind.RUNNER and self._is_dial_out(holder.name)

    def _is_seen_locally(self, host: str, now: float) -> bool:
        """Whether a holder that is not a dial-out runner observed a host lately, or holds memory there."""
        known = self._hosts.get(host)
        if known is not None and not known.by_dial_out and now - known.seen < DEVICES_KEPT_SECONDS:
            return True
        return any(not self._is_of_dial_out(lease.grant.holder) for lease in self.leases_on(host))

    def forget_hosts(self, now: float) -> None:
        """Remove hosts without leases that were not observed for too long."""
        seen_before = now - self._host_keep_seconds
        for name in [name for name, host in self._hosts.items() if host.seen < seen_before]:
            if name not in self._on_host:
                del self._hosts[name]

    def open(self, host: str) -> HostAccount | None:
        """Return the memory account of a host at this moment; None: it was not observed yet."""
        seen = self._hosts.get(host)
        return None if seen is None else host_account(seen.snapshot, self.leases_on(host), self._margin)
