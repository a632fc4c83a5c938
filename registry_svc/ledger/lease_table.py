"""In-memory table of leases and last observations of hosts, and checks of their holders.

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
    LeaseState,
    with_gone,
)
from registry_svc.mesh.session_state import SessionState
from weft.gpu.snapshot import HostSnapshot
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

RunnerOf = Callable[[str], SessionState | None]
"""Returns a runner by name, active or not; None if it is unknown."""

MAX_HOSTS = 10_000
"""Maximum number of remembered hosts, far more than a mesh has. Programs can report a host without a session."""

DEVICES_KEPT_SECONDS = 60.0
"""How long the devices of a host are remembered while reports have none."""


def _ignore_change(_host: str) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenHost:
    """The last observation of a host."""

    snapshot: HostSnapshot
    seen: float
    """When it arrived, in monotonic seconds."""
    seen_at: datetime
    by_dial_out: bool


class LeaseTable:
    """Leases by id and host, and last observations of hosts."""

    def __init__(
        self,
        margin: int,
        host_keep_seconds: float,
        runner_of: RunnerOf,
        on_change: Callable[[str], None] = _ignore_change,
    ) -> None:
        """`host_keep_seconds` is how long an unobserved host without leases is remembered.

        `on_change` is called with a host whenever it or its leases change.
        """
        self._on_change = on_change
        self._margin = margin
        self._runner_of = runner_of
        self._host_keep_seconds = host_keep_seconds
        self._leases: dict[str, Lease] = {}
        self._on_host: dict[str, dict[str, None]] = {}
        self._hosts: dict[str, SeenHost] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._leases.values()))

    def lease(self, lease_id: str) -> Lease | None:
        """Returns a lease; None if it has ended or never existed."""
        return self._leases.get(lease_id)

    def put(self, lease: Lease) -> None:
        """Adds a lease, or replaces its state."""
        self._leases[lease.grant.id] = lease
        self._on_host.setdefault(lease.grant.host, {})[lease.grant.id] = None
        self._on_change(lease.grant.host)

    def drop(self, lease: Lease) -> None:
        """Removes an ended lease."""
        del self._leases[lease.grant.id]
        there = self._on_host[lease.grant.host]
        del there[lease.grant.id]
        if not there:
            del self._on_host[lease.grant.host]
        self._on_change(lease.grant.host)

    def leases_on(self, host: str) -> tuple[Lease, ...]:
        """Returns the leases on a host, sorted by fencing number."""
        return tuple(self._leases[lease_id] for lease_id in self._on_host.get(host, ()))

    def host(self, name: str) -> SeenHost | None:
        """Returns the last observation of a host; None if it was not observed since the registry started."""
        return self._hosts.get(name)

    def host_names(self) -> list[str]:
        """Returns the names of all observed hosts, sorted."""
        return sorted(self._hosts)

    def see(self, holder: Holder, snapshot: HostSnapshot, now: float, now_utc: datetime) -> None:
        """Records what a holder observed. Raises TOO_MANY_RESOURCES if MAX_HOSTS are known.

        Ignores a dial-out runner on a host that a local holder observes or holds memory on, since the observation could
        end leases of others.
        """
        known, by_dial_out = self._hosts.get(snapshot.host), self._is_of_dial_out(holder)
        if by_dial_out and self.is_seen_locally(snapshot.host, now):
            return
        if known is None and len(self._hosts) >= MAX_HOSTS:
            self.forget_hosts(now)
        if known is None and len(self._hosts) >= MAX_HOSTS:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES, f"the memory of {MAX_HOSTS} hosts is booked already, which is the most"
            )
        # A holder that sees no devices may run in a container, next to holders that do see them.
        if snapshot.devices or known is None or now - known.seen >= DEVICES_KEPT_SECONDS:
            self._hosts[snapshot.host] = SeenHost(snapshot=snapshot, seen=now, seen_at=now_utc, by_dial_out=by_dial_out)
        if any(not process.alive for process in snapshot.processes):
            for lease in self.leases_on(snapshot.host):
                self._leases[lease.grant.id] = with_gone(lease, snapshot.processes)
        self._on_change(snapshot.host)

    def _is_of_dial_out(self, holder: Holder) -> bool:
        runner = self._runner_of(holder.name) if holder.kind is HolderKind.RUNNER else None
        return runner is not None and runner.profile.dial_out

    def is_unowned(self, lease: Lease) -> bool:
        """Whether no runner is responsible for a lease: its holder is silent, or no longer publishes the model."""
        holder, model = lease.grant.holder, lease.grant.purpose
        if lease.state is LeaseState.HELD and holder.kind is HolderKind.RUNNER:
            runner = self._runner_of(holder.name)
            return runner is None or (bool(model) and model not in runner.publications)
        return lease.state is LeaseState.ORPHANED

    def is_present(self, holder: Holder, session_id: str) -> bool:
        """Whether a holder has its runner's current incarnation. Raises PERMISSION_DENIED for another session."""
        if holder.kind is HolderKind.PROGRAM:
            return True
        runner = self._runner_of(holder.name)
        if runner is None or runner.session.id != session_id:
            raise WeftError(
                Reason.PERMISSION_DENIED,
                f"this is not the session of the runner {holder.name!r}; open one first",
                metadata={"runner": holder.name},
            )
        return runner.session.incarnation == holder.incarnation

    def require_present(self, holder: Holder, session_id: str) -> None:
        """Raises PERMISSION_DENIED unless the holder has its runner's session and current incarnation."""
        if not self.is_present(holder, session_id):
            raise WeftError(
                Reason.PERMISSION_DENIED,
                f"the runner {holder.name!r} has another incarnation since; open its session again",
                metadata={"runner": holder.name},
            )

    def is_seen_locally(self, host: str, now: float) -> bool:
        """Whether a holder other than a dial-out runner recently observed a host, or holds memory there."""
        known = self._hosts.get(host)
        if known is not None and not known.by_dial_out and now - known.seen < DEVICES_KEPT_SECONDS:
            return True
        return any(not self._is_of_dial_out(lease.grant.holder) for lease in self.leases_on(host))

    def require_own_host(self, holder: Holder, host: str, now: float) -> None:
        """Raises PERMISSION_DENIED for memory of a host that runners or programs of the mesh itself observe."""
        if self._is_of_dial_out(holder) and self.is_seen_locally(host, now):
            raise WeftError(
                Reason.PERMISSION_DENIED,
                f"runners or programs of the mesh have the host {host!r}; open the session again",
            )

    def forget_hosts(self, now: float) -> None:
        """Removes hosts without leases that were not observed for `host_keep_seconds`."""
        seen_before = now - self._host_keep_seconds
        for name in [name for name, host in self._hosts.items() if host.seen < seen_before]:
            if name not in self._on_host:
                del self._hosts[name]
                self._on_change(name)

    def open(self, host: str) -> HostAccount | None:
        """Returns the current memory account of a host; None if it was not observed yet."""
        seen = self._hosts.get(host)
        if seen is None:
            return None
        # A joined runner that stated the host before its own runners did books nothing of theirs.
        own = (each for each in self.leases_on(host) if seen.by_dial_out or not self._is_of_dial_out(each.grant.holder))
        return host_account(seen.snapshot, tuple(own), self._margin)
